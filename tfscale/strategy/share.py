r"""Number of replicas in a step, as a ``Share``: exact for parts of a batch of any size.

Keras multiplies a replica's mean loss by ``1 / num_replicas_in_sync`` and adds the
gradients of all replicas. With parts of :math:`b_r` samples, the sum is the gradient of
the global mean only if all :math:`b_r` are equal. If the share :math:`b_r / \sum_s b_s`
replaces :math:`1/n`, the sum is always that gradient. So inside a step the number of
replicas is a ``Share``. A ``Share`` counts, compares and prints as the number of replicas,
but dividing by it multiplies by this replica's share, and multiplying by it divides by
that share.

The factors have names by which ``marks_of`` recognizes them in a graph.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

# Marks of an operation that multiplies by a replica's share, and of one that divides by it.
SCALES, RESTORES = 1, 2

# Names of such operations.
_SCALES = "tfscale_share"
_RESTORES = "tfscale_count"
# Name of an operation that gives a loss whose terms have been weighted.
_PART = "tfscale_part"


@functools.total_ordering
class Share:
    """Number of replicas, of which this replica holds ``local`` of ``total`` parts.

    ``Share`` is not a subclass of int: Python would compute ``1.0 / n`` of an int by itself.

    Args:
        replicas: number of replicas.
        local: number of parts that this replica holds.
        total: number of parts that all replicas hold.
        rows: share of the rows, if this is another share of the same step.
        copies: number of replicas that hold the same parts; ``total`` counts each of them.
    """

    def __init__(
        self,
        replicas: int,
        local: tf.Tensor,
        total: tf.Tensor,
        rows: Share | None = None,
        copies: int = 1,
    ) -> None:
        self.local, self.total = local, total
        self._replicas, self.copies = replicas, copies
        self._rows = rows or self
        self._reads = 0
        self._weights: dict[Any, tf.Tensor] = {}  # keys: graph and dtype

    def of(self, local: tf.Tensor, total: tf.Tensor) -> Share:
        """Return a share of something else than rows, in the same step."""
        return Share(self._replicas, local, total, self._rows, self.copies)

    @property
    def is_same_on_all(self) -> bool:
        """Whether all of several replicas hold the same parts."""
        return self.copies == self._replicas > 1

    @property
    def reads(self) -> int:
        """Number of times that the step has scaled a value by a share."""
        return self._rows._reads

    def weight(self, dtype: tf.DType | None = None) -> tf.Tensor:
        """Return this replica's share, in Keras's float type by default; 0 if the total is 0."""
        dtype = dtype or _dtype(None)
        if tf.executing_eagerly():
            return self._weight(dtype)
        key = (tf.compat.v1.get_default_graph(), dtype)
        if key not in self._weights:
            self._weights[key] = self._weight(dtype)
        return self._weights[key]

    def _weight(self, dtype: tf.DType) -> tf.Tensor:
        # 65,536 elements are infinite in float16.
        wide = dtype if dtype.size > 2 else tf.float32
        held = tf.math.divide_no_nan(tf.cast(self.local, wide), tf.cast(self.total, wide))
        return tf.cast(held, dtype)

    def part(self, dtype: tf.DType | None = None) -> tf.Tensor:
        """Return this replica's share as a factor of a loss: the product counts as scaled."""
        return self._marked(self.weight(dtype), _SCALES)

    def presence(self, dtype: tf.DType) -> tf.Tensor:
        """Return the weight of a loss that is a sum: 1, or 0 if this replica holds nothing.

        Replicas that hold the same parts have equal parts of 1.
        """
        holds = tf.cast(self.local > 0, dtype)
        return holds if self.copies == 1 else holds / self.copies

    def present(self, dtype: tf.DType) -> tf.Tensor:
        """Return ``presence`` as a factor of a loss: the product counts as scaled."""
        return self._marked(self.presence(dtype), _SCALES)

    def count(self, dtype: tf.DType | None = None) -> tf.Tensor:
        """Return one over the share; 0 if this replica holds nothing."""
        dtype = dtype or _dtype(None)
        inverse = tf.math.divide_no_nan(tf.cast(self.total, dtype), tf.cast(self.local, dtype))
        return self._marked(inverse, _RESTORES)

    def _marked(self, factor: tf.Tensor, name: str) -> tf.Tensor:
        self._rows._reads += 1
        return tf.identity(factor, name=name)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        if dtype is not None and not dtype.is_floating:
            raise TypeError("a share is a ratio")  # TensorFlow then asks __rmul__
        if name == "y" and dtype is None:  # TensorFlow converts a divisor
            return tf.math.reciprocal(self.part())  # infinite for a share of 0: x / inf is 0
        return self.count(dtype)

    def __rtruediv__(self, other: Any) -> tf.Tensor:
        return other * self.part(_dtype(other))

    def __mul__(self, other: Any) -> tf.Tensor:
        if tf.is_tensor(other) and other.dtype.is_integer:
            product = tf.cast(other, tf.float64) / self.weight(tf.float64)
            # An empty replica does not know the others' sizes: use the total.
            whole = tf.where(self.local > 0, product, tf.cast(self.total, tf.float64))
            # A loss that is divided by the size of the whole batch counts as scaled.
            return self._marked(tf.cast(tf.round(whole), other.dtype), _SCALES)
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

    def __repr__(self) -> str:
        return f"{self._replicas}"


def _dtype(value: Any) -> tf.DType:
    if tf.is_tensor(value):
        return value.dtype
    return tf.float64 if keras.backend.floatx() == "float64" else tf.float32


def as_scaled(loss: tf.Tensor) -> tf.Tensor:
    """Return a loss whose terms have all been weighted, so that the loss counts as scaled."""
    return tf.identity(loss, name=_PART)


def marks_of(op: tf.Operation) -> int:
    """Return whether an operation gives a replica's share (SCALES), or its inverse (RESTORES)."""
    name: str = op.name.rpartition("/")[2]
    return SCALES * name.startswith((_SCALES, _PART)) | RESTORES * name.startswith(_RESTORES)
