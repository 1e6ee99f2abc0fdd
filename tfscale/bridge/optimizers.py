"""The Keras that is installed, as optimizers see it: its optimizer and its ops."""

from __future__ import annotations

from typing import Any

import keras

from tfscale.bridge.installed import KERAS_2

if KERAS_2:
    from tfscale.bridge.keras2_optimizers import (
        HOW_A_WRAPPEE_IS_TOLD,
        LossScaleOptimizer,
        Optimizer,
        building,
        gradients_are_sums,
        is_told_to_wrappee,
        ops,
        scale_of,
    )
else:
    from keras import name_scope as building, ops  # type: ignore[no-redef]
    from keras.optimizers import LossScaleOptimizer, Optimizer  # type: ignore[no-redef]

    def scale_of(scaler: Any) -> Any:
        """Return the factor of the loss."""
        return scaler.dynamic_scale if scaler.built else scaler.initial_scale

    HOW_A_WRAPPEE_IS_TOLD = ("its loss_scale_factor to None", "set loss_scale_factor to 1.0")

    def is_told_to_wrappee(name: str, value: Any) -> bool:
        """Whether LossScaleOptimizer sets this attribute of the optimizer that it wraps."""
        return name == "loss_scale_factor" and value is None

    def gradients_are_sums() -> bool:
        """Whether gradients are sums over all replicas before they are applied."""
        return False


# Their rules update each number of a weight by itself, whatever the weight's other numbers are.
_ELEMENTWISE = tuple(
    getattr(keras.optimizers, name, None)
    for name in (
        *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam"),
        *("Ftrl", "Lion", "ScheduleFreeAdamW"),
    )
)
_CONSTANT = (
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
)


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer is known to update each number of a weight by itself.

    A subclass may do something else, and so may a method that a user has put on the optimizer.
    """
    own = {"update_step", "_clip_by_norm"} & vars(optimizer).keys()
    return type(optimizer) in _ELEMENTWISE and not own


def works_on_slices(constraint: Any) -> bool:
    """Whether a constraint changes each number of a weight by itself."""
    return type(constraint) is keras.constraints.NonNeg


def constant_initializer(initializer: Any) -> Any:
    """Return a function that makes equal numbers, of a shape and a type; None for others."""
    found = keras.initializers.get(initializer)
    if type(found) not in _CONSTANT:
        return None
    return lambda shape, dtype: found(shape, dtype=dtype.name)
