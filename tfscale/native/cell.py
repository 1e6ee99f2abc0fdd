"""Tensors that graphs change and that no strategy, checkpoint or saved model sees."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

_numbers = itertools.count()


class Cell:
    """A tensor that a graph may change, unknown to strategies and checkpoints.

    A strategy would mirror and synchronise a ``tf.Variable`` that is made under its scope.
    """

    def __init__(self, dtype: tf.DType) -> None:
        self._dtype = dtype
        self._handle = tf.raw_ops.VarHandleOp(
            dtype=dtype, shape=None, shared_name=f"tfscale_cell_{next(_numbers)}"
        )

    def read(self) -> tf.Tensor:
        """Return the value as a tensor."""
        return tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype)

    def numpy(self) -> Any:
        """Return the current value, even while a function is traced."""
        with tf.init_scope():
            return self.read().numpy()

    def assign(self, value: Any) -> None:
        """Set the value."""
        value = tf.convert_to_tensor(value, self._dtype)
        tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def clear(self) -> None:
        """Free the memory: the cell holds no numbers until a new value is assigned."""
        with tf.device(self._handle.device):
            self.assign(tf.zeros([0], self._dtype))


def make_cell(device: str, dtype: tf.DType, value: Any = None) -> Cell:
    """Return a new cell on a device; without a value, nobody may read it before it is assigned."""
    with tf.init_scope(), tf.device(device):
        cell = Cell(dtype)
        if value is not None:
            cell.assign(value)
    return cell
