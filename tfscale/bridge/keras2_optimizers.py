"""Keras 2's optimizer with the face of Keras 3's, for those who need tensorflow-addons."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

# Those that the rules use, by their names in Keras 3.
ops = SimpleNamespace(
    cast=tf.cast,
    clip=tf.clip_by_value,
    expm1=tf.math.expm1,
    log2=tf.experimental.numpy.log2,
    maximum=tf.maximum,
    minimum=tf.minimum,
    ones_like=tf.ones_like,
    power=tf.pow,
    round=tf.round,
    sqrt=tf.sqrt,
    square=tf.square,
    where=tf.where,
    zeros_like=tf.zeros_like,
)

LossScaleOptimizer = keras.mixed_precision.LossScaleOptimizer


def scale_of(scaler: Any) -> Any:
    """Return the factor of the loss."""
    return scaler.loss_scale


HOW_A_WRAPPEE_IS_TOLD = ("_is_wrapped_by_loss_scale_optimizer", "leave that attribute alone")


def is_told_to_wrappee(name: str, value: Any) -> bool:
    """Whether LossScaleOptimizer sets this attribute of the optimizer that it wraps."""
    return name == "_is_wrapped_by_loss_scale_optimizer" and bool(value)


def gradients_are_sums() -> bool:
    """Whether they are those of all replicas when they are applied."""
    return bool(tf.distribute.get_strategy().num_replicas_in_sync > 1)


@contextlib.contextmanager
def building(name: str) -> Iterator[None]:
    """Enter the scope in which an optimizer of this name makes its variables."""
    with tf.name_scope(name), tf.init_scope():
        yield


class Optimizer(keras.optimizers.Optimizer):
    """An optimizer that sums gradients over replicas before it clips them, as Keras 2 does."""

    # Keras 2 knows neither.
    loss_scale_factor: float | None = None
    gradient_accumulation_steps: int | None = None

    def __init__(self, learning_rate: Any, weight_decay: Any, **base: Any) -> None:
        base = {"name": type(self).__name__, **base, "jit_compile": False}
        super().__init__(weight_decay=weight_decay, **base)
        self._learning_rate = self._build_learning_rate(learning_rate)

    @property
    def built(self) -> bool:
        """Whether the variables are known."""
        return bool(getattr(self, "_built", False))

    def build(self, variables: Any) -> None:
        """Make the variables; Keras calls this in every step."""
        super().build(variables)
        # A plain attribute would be tracked, and the model saved twice.
        object.__setattr__(self, "_trainable_variables", list(variables))
        self._built = True

    def _get_variable_index(self, variable: Any) -> int:
        return int(self._index_dict[self._var_key(variable)])

    def _overwrite_variable_with_gradient(self, variable: Any) -> bool:
        return False  # there are no such variables

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Any,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Sum gradients over replicas, and apply the sums."""
        pairs = list(grads_and_vars)
        if experimental_aggregate_gradients and not skip_gradients_aggregation:
            pairs = self.aggregate_gradients(pairs)
        self.apply([g for g, _ in pairs], [v for _, v in pairs])
        return self.iterations

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Update the variables, as in Keras 3."""
        variables = (
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        pairs = zip(grads, variables, strict=True)
        super().apply_gradients(pairs, skip_gradients_aggregation=True)

    def _internal_apply_gradients(self, grads_and_vars: Any) -> Any:
        gradients, variables = zip(*grads_and_vars, strict=True)
        rate = tf.convert_to_tensor(self.learning_rate)
        return self._backend_update_step(gradients, variables, rate)

    def _backend_update_step(self, grads: Any, variables: Any, learning_rate: Any) -> Any:
        given = [(g, learning_rate) for g in grads]
        return super()._internal_apply_gradients(list(zip(given, variables, strict=True)))

    def _update_step(self, gradient: Any, variable: Any) -> None:
        self.update_step(gradient[0], variable, gradient[1])

    def get_config(self) -> dict[str, Any]:
        """Return all arguments, in types that JSON knows."""
        rate = self._serialize_hyperparameter(self._learning_rate)
        return {**super().get_config(), "learning_rate": rate}
