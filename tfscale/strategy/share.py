r"""The number of replicas as a step sees it: exact for shards of any size.

Keras multiplies a replica's mean loss by ``1 / num_replicas_in_sync`` and adds the
gradients of all replicas. With shards of :math:`b_r` samples that is the gradient of
the global mean only if all are equal; with :math:`1/n` replaced by the share
:math:`b_r / \sum_s b_s` it always is. So inside a step the number of replicas is a
``Share``: it counts, compares and prints as the number that it is, but dividing by
it multiplies by this replica's share, and multiplying by it divides by that share.

A traced tensor tells afterwards whether its loss was scaled so: ``is_scaled``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.exchange import dataflow
from tfscale.strategy.current import current


class Share:
    """``replicas``, of which this one holds ``local`` of ``total`` parts.

    It is not a subclass of int: Python would compute ``1.0 / n`` of an int by itself.
    """

    def __init__(self, replicas: int, local: tf.Tensor, total: tf.Tensor) -> None:
        self._replicas = replicas
        self._local = local
        self._total = total

    def weight(self, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """This replica's share; 0 where there is nothing to share."""
        return tf.math.divide_no_nan(tf.cast(self._local, dtype), tf.cast(self._total, dtype))

    def part(self, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """This replica's share as a factor of a loss: the product counts as scaled."""
        return _marked(self.weight(dtype), _SCALES)

    def present(self, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """For a loss that sums: 1, or 0 for a replica that holds nothing."""
        return _marked(tf.cast(self._local > 0, dtype), _SCALES)

    def count(self, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """One over the share; 0 for a replica that holds nothing."""
        inverse = tf.math.divide_no_nan(tf.cast(self._total, dtype), tf.cast(self._local, dtype))
        return _marked(inverse, _RESTORES)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        if dtype is not None and not dtype.is_floating:
            raise TypeError("a share is a ratio")  # TensorFlow then asks __rmul__
        if name == "y" and dtype is None:  # so TensorFlow asks for a divisor
            return tf.math.reciprocal(self.part())  # infinite where nothing is to be left
        return self.count(dtype or tf.float32)

    def __rtruediv__(self, other: Any) -> tf.Tensor:
        return other * self.part(_dtype(other))

    def __mul__(self, other: Any) -> tf.Tensor:
        if tf.is_tensor(other) and other.dtype.is_integer:
            product = tf.cast(other, tf.float64) / self.weight(tf.float64)
            # A size of nothing says nothing of the others: the total is given.
            whole = tf.where(self._local > 0, product, tf.cast(self._total, tf.float64))
            # A whole batch's size is there to be divided by.
            return _marked(tf.cast(tf.round(whole), other.dtype), _SCALES)
        return other * self.count(_dtype(other))

    __rmul__ = __mul__

    def __int__(self) -> int:
        return self._replicas

    __index__ = __int__

    def __float__(self) -> float:
        return float(self._replicas)

    def __hash__(self) -> int:
        return hash(self._replicas)

    def __eq__(self, other: object) -> bool:
        return self._replicas == other

    def __lt__(self, other: Any) -> bool:
        return bool(self._replicas < other)

    def __le__(self, other: Any) -> bool:
        return bool(self._replicas <= other)

    def __gt__(self, other: Any) -> bool:
        return bool(self._replicas > other)

    def __ge__(self, other: Any) -> bool:
        return bool(self._replicas >= other)

    def __repr__(self) -> str:
        return f"{self._replicas}"


def _dtype(value: Any) -> tf.DType:
    return value.dtype if tf.is_tensor(value) else tf.float32


# Names of operations in a step's graph.
_SCALES = "tfscale_share"
_RESTORES = "tfscale_count"


def _marked(factor: tf.Tensor, name: str) -> tf.Tensor:
    current.reads += 1
    return tf.identity(factor, name=name)


def are_scaled(values: Sequence[Any], since: int = 0) -> list[bool]:
    """Which of these losses, or gradients of losses, have a replica's share as a factor.

    In a graph this can be seen. Eagerly losses count as scaled once the step has read the number
    of replicas more often than ``since``.
    """
    tensors = [v.values if isinstance(v, tf.IndexedSlices) else v for v in values]
    if tf.executing_eagerly():
        return [current.reads > since] * len(tensors)
    bits = dataflow.gathered(tensors, _bit, current.seen)
    return [found in (1, 2) for found in bits]  # both: scaled, and then scaled back


def is_scaled(value: Any, since: int = 0) -> bool:
    """The same for one."""
    return are_scaled([value], since)[0]


def _bit(op: tf.Operation) -> int:
    name: str = op.name.rpartition("/")[2]
    return 1 * name.startswith(_SCALES) | 2 * name.startswith(_RESTORES)
