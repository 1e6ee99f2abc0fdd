"""The grid on which whole numbers travel between layers, and pooling that stays on it.

A mean of numbers on the grid is not on it. So layers that take means round while they infer.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.analysis.quantize import dyadic

registered = keras.saving.register_keras_serializable(package="tfscale")


@registered
class Grid(keras.layers.Layer):
    """The step of a model's grid, as a weight of each layer that rounds to it."""

    def build(self, input_shape: Any = None) -> None:
        """Make the weight."""
        self.step = self.add_weight(
            shape=[], initializer="ones", trainable=False, name="step", dtype="float32",
            autocast=False,
        )  # fmt: skip

    def enter(self, x: Any) -> Any:
        """Return numbers as whole numbers of the grid, in float64."""
        return dyadic.on_grid(x, tf.convert_to_tensor(self.step))

    def leave(self, whole: Any, dtype: Any) -> Any:
        """Return the real numbers that whole numbers of the grid stand for."""
        return dyadic.off_grid(whole, tf.convert_to_tensor(self.step), dtype)


class Watch:
    """Values that a layer sees while it is calibrated.

    Attributes:
        inputs: values before each of the layer's kernels, as a list per kernel.
        largest: largest magnitude of all inputs and outputs.
    """

    SAMPLE = 1 << 16  # values kept of each batch

    def __init__(self) -> None:
        self.inputs: dict[int, list[np.ndarray]] = {}
        self.largest = 0.0

    def note(self, values: Any, stage: int | None = None) -> None:
        """Keep some of the values, with the smallest and the largest."""
        flat = np.asarray(values, np.float32).ravel()
        self.largest = max(self.largest, float(np.abs(flat).max(initial=0)))
        if stage is not None:
            some = flat[:: max(1, flat.size // self.SAMPLE)]
            ends = [flat.min(initial=0), flat.max(initial=0)]
            self.inputs.setdefault(stage, []).append(np.concatenate([some, ends]))

    def seen(self, stage: int) -> np.ndarray:
        """Return the values kept of one kernel's inputs."""
        return np.concatenate(self.inputs[stage])


def rounds_to_grid(layer: Any, training: Any) -> bool:
    """Return whether a call of a layer computes with whole numbers."""
    return not training and layer.compute_dtype == "float32"


class Pooling:
    """A pooling layer of Keras whose means are on the grid."""

    watch: Watch | None = None

    def build(self: Any, input_shape: Any) -> None:
        """Make the step of the grid."""
        super().build(input_shape)  # type: ignore[misc]
        self.grid = Grid(name="grid")
        self.grid.build(None)

    def call(self: Any, inputs: Any, training: Any = None) -> Any:
        """Take means, and round them to the grid while the model infers."""
        if self.watch is not None or not rounds_to_grid(self, training):
            return super().call(inputs)  # type: ignore[misc]
        means = super().call(self.grid.enter(inputs))  # type: ignore[misc]
        # Sums are whole, so no mean but a half is as near to the next number as this.
        nearly_half = 0.25 / self.summed(inputs, means)
        return self.grid.leave(dyadic.round_half_up(means + nearly_half), inputs.dtype)

    def summed(self: Any, inputs: Any, means: Any) -> Any:
        """Return how many numbers a mean has at most."""
        if hasattr(self, "pool_size"):
            return float(np.prod(self.pool_size))
        return tf.cast(tf.size(inputs) // tf.maximum(tf.size(means), 1), tf.float64)


POOLINGS: dict[type, Any] = {}
for _name in (
    "AveragePooling1D", "AveragePooling2D", "AveragePooling3D",
    "GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalAveragePooling3D",
):  # fmt: skip
    _base = getattr(keras.layers, _name)
    _made = registered(
        type(
            f"Grid{_name}",
            (Pooling, _base),
            {
                "__doc__": f"Keras's {_name}, whose means are on the grid while the model infers.",
                "__module__": __name__,
            },
        )
    )
    POOLINGS[_base] = globals()[_made.__name__] = _made
