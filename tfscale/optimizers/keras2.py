"""Keras 2's optimizer with the face of Keras 3's, for those who need tensorflow-addons."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

# Those that the rules use, by their names in Keras 3.
ops = SimpleNamespace(
    cast=tf.cast,
    clip=tf.clip_by_value,
    expm1=tf.math.expm1,
    minimum=tf.minimum,
    ones_like=tf.ones_like,
    sqrt=tf.sqrt,
    square=tf.square,
    sum=tf.reduce_sum,
    where=tf.where,
)


class Optimizer(keras.optimizers.Optimizer):
    """See the module. It sums gradients over replicas before they are clipped, as Keras 2 does."""

    def __init__(self, learning_rate: Any, weight_decay: Any, **base: Any) -> None:
        base = {"name": type(self).__name__, **base, "jit_compile": False}
        super().__init__(weight_decay=weight_decay, **base)
        self._learning_rate = self._build_learning_rate(learning_rate)

    @property
    def built(self) -> bool:
        """Whether the variables are known."""
        return bool(getattr(self, "_built", False))

    def build(self, variables: Any) -> None:
        """Called by Keras, in every step."""
        super().build(variables)
        # A plain attribute would be tracked, and the model saved twice.
        object.__setattr__(self, "_trainable_variables", list(variables))
        self._built = True

    def _get_variable_index(self, variable: Any) -> int:
        return int(self._index_dict[self._var_key(variable)])

    def _overwrite_variable_with_gradient(self, variable: Any) -> bool:
        return False  # there are no such variables

    def _of_step(self, learning_rate: Any) -> Any:
        return learning_rate

    def _update_step(self, gradient: Any, variable: Any) -> None:
        dense = tf.convert_to_tensor(gradient)  # rows that come twice are summed
        self.update_step(dense, variable, self._of_step(self.learning_rate))

    def get_config(self) -> dict[str, Any]:
        """All arguments, in types that JSON knows."""
        rate = self._serialize_hyperparameter(self._learning_rate)
        return {**super().get_config(), "learning_rate": rate}
