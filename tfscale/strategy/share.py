r"""Number of replicas in a step, as a ``Share``: exact for parts of a batch of any size.

Keras multiplies a replica's mean loss by ``1 / num_replicas_in_sync`` and adds the
gradients of all replicas. With parts of :math:`b_r` samples, the sum is the gradient of
the global mean only if all :math:`b_r` are equal. If the share :math:`b_r / \sum_s b_s`
replaces :math:`1/n`, the sum is always that gradient. So inside a step the number of
replicas is a ``Share``. A ``Share`` counts, compares and prints as the number of replicas,
but dividing by it multiplies by this replica's share, and multiplying by it divides by
that share.

``is_scaled`` reads from a traced tensor whether its loss was scaled in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.exchange import dataflow
from tfscale.strategy.current import current


class Share:
    """Number of replicas, of which this replica holds ``local`` of ``total`` parts.

    ``Share`` is not a subclass of int: Python would compute ``1.0 / n`` of an int by itself.
    """

    def __init__(self, replicas: int, local: tf.Tensor, total: tf.Tensor) -> None:
        self._replicas = replicas
        self._local = local
        self._total = total
        self._weights: dict[Any, tf.Tensor] = {}  # keys: graph and dtype

    def weight(self, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """Return this replica's share; 0 if the total is 0."""
        if tf.executing_eagerly():
            return self._weight(dtype)
        key = (tf.compat.v1.get_default_graph(), dtype)
        if key not in self._weights:
            self._weights[key] = self._weight(dtype)
        return self._weights[key]

    def _weight(self, dtype: tf.DType) -> tf.Tensor:
        # 65,536 elements are infinite in float16.
        wide = dtype if dtype.size > 2 else tf.float32
        held = tf.math.divide_no_nan(tf.cast(self._local, wide), tf.cast(self._total, wide))
        return tf.cast(held, dtype)

    def part(self, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """Return this replica's share as a factor of a loss: the product counts as scaled."""
        return _marked(self.weight(dtype), _SCALES)

    def present(self, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """Return the factor of a loss that is a sum: 1, or 0 if this replica holds nothing."""
        return _marked(tf.cast(self._local > 0, dtype), _SCALES)

    def count(self, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """Return one over the share; 0 if this replica holds nothing."""
        inverse = tf.math.divide_no_nan(tf.cast(self._total, dtype), tf.cast(self._local, dtype))
        return _marked(inverse, _RESTORES)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        if dtype is not None and not dtype.is_floating:
            raise TypeError("a share is a ratio")  # TensorFlow then asks __rmul__
        if name == "y" and dtype is None:  # TensorFlow converts a divisor
            return tf.math.reciprocal(self.part())  # infinite for a share of 0: x / inf is 0
        return self.count(dtype or tf.float32)

    def __rtruediv__(self, other: Any) -> tf.Tensor:
        return other * self.part(_dtype(other))

    def __mul__(self, other: Any) -> tf.Tensor:
        if tf.is_tensor(other) and other.dtype.is_integer:
            product = tf.cast(other, tf.float64) / self.weight(tf.float64)
            # An empty replica does not know the others' sizes: use the total.
            whole = tf.where(self._local > 0, product, tf.cast(self._total, tf.float64))
            # A loss that is divided by the size of the whole batch counts as scaled.
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


# Bits of an operation in a step's graph, which all operations that depend on it inherit. The bits
# from ``_FIRST`` on say on which tensors of the batch an operation depends; the last bit stands
# for all tensors after the first ``_TOLD_APART``.
SCALES, RESTORES, BATCH, RESIZES, TURNS, _FIRST = 1, 2, 4, 8, 16, 32
_TOLD_APART = 16
_ANY = ((1 << _TOLD_APART + 1) - 1) * _FIRST

# Names of the operations that multiply by a replica's share, or divide by it.
_SCALES = "tfscale_share"
_RESTORES = "tfscale_count"
# Name of an operation that gives a loss whose terms have been weighted.
_PART = "tfscale_part"

# Operations whose results have a number of rows that depends on the values of the data.
_RESIZING = (
    *("Where", "Unique", "UniqueV2", "UniqueWithCounts", "DynamicPartition", "ListDiff"),
    *("NonMaxSuppressionV3", "NonMaxSuppressionV4", "PartitionedCall", "StatefulPartitionedCall"),
)


def _marked(factor: tf.Tensor, name: str) -> tf.Tensor:
    current.reads += 1
    return tf.identity(factor, name=name)


def as_scaled(loss: tf.Tensor) -> tf.Tensor:
    """Return a loss whose terms have all been weighted, so that the loss counts as scaled."""
    return tf.identity(loss, name=_PART)


def are_scaled(values: Sequence[Any], since: int = 0) -> list[bool]:
    """Return which of these losses, or gradients of losses, have a replica's share as a factor.

    The graph shows the factor. In an eager step, losses count as scaled once the step has read the
    number of replicas more often than ``since``.
    """
    tensors = [v.values if isinstance(v, tf.IndexedSlices) else v for v in values]
    if tf.executing_eagerly():
        return [current.reads > since] * len(tensors)
    # A loss that was scaled and then scaled back counts as not scaled.
    return [bits & (SCALES | RESTORES) in (SCALES, RESTORES) for bits in _bits_of_all(tensors)]


def is_scaled(value: Any, since: int = 0) -> bool:
    """Return whether one loss, or gradient of a loss, has a replica's share as a factor."""
    return are_scaled([value], since)[0]


def bits_of(tensor: tf.Tensor) -> int:
    """Return the bits of the operations that a traced tensor is computed from."""
    return _bits_of_all([tensor])[0]


def _bits_of_all(tensors: Sequence[tf.Tensor]) -> list[int]:
    def own(op: tf.Operation) -> int:
        marks = marks_of(op) | _marks_within(op)
        return marks | _given(op) | RESIZES * _resizes(op) | TURNS * _turns(op)

    return dataflow.gathered(tensors, own, current.seen)


def marks_of(op: tf.Operation) -> int:
    """Return whether an operation gives a replica's share (SCALES), or its inverse (RESTORES)."""
    name: str = op.name.rpartition("/")[2]
    return SCALES * name.startswith((_SCALES, _PART)) | RESTORES * name.startswith(_RESTORES)


def _marks_within(op: tf.Operation) -> int:
    """Return the marks within the function, the branches or the loop that an operation runs."""
    marks = 0
    for graph in dataflow.called_graphs(op):
        for inner in graph.get_operations():
            marks |= marks_of(inner) | _marks_within(inner)
    return marks


def _given(op: tf.Operation) -> int:
    """Return the bits of the batch's tensor that an operation gives; 0 if it gives none."""
    if op in current.batch_ops:
        return BATCH | _FIRST << min(current.batch_ops[op], _TOLD_APART)
    return (BATCH | _ANY) * _is_argument(op)


def _is_argument(op: tf.Operation) -> bool:
    """Return whether an operation is an argument of a function or a loop within the step.

    Such an argument may depend on the batch. All arguments of the step's own graph, except the
    batch, are the same on all replicas.
    """
    if op.type != "Placeholder" or dataflow.is_captured(op):
        return False
    return all(op.graph is not given.graph for given in current.batch_ops)


def _resizes(op: tf.Operation) -> bool:
    return op.type in _RESIZING or op.type.startswith("Ragged") or _cuts_rows(op)


def _turns(op: tf.Operation) -> bool:
    """Return whether an operation may move the first axis, along which samples lie."""
    if op.type != "Transpose":
        return False
    axes = tf.get_static_value(op.inputs[1])
    return axes is None or (axes.size > 0 and axes[0] != 0)


def _cuts_rows(op: tf.Operation) -> bool:
    """Return whether an operation takes only some rows of a batch, as ``x[1:]`` does."""
    if op.type not in ("StridedSlice", "Slice", "TopKV2"):
        return False
    x = op.inputs[0].shape
    if x.rank is None or x.rank == 0 or x[0] is not None:
        return False
    if op.type == "TopKV2":
        return bool(x.rank == 1)
    if op.type == "Slice":
        begin, size = (tf.get_static_value(op.inputs[i]) for i in (1, 2))
        return begin is None or size is None or begin[0] != 0 or size[0] != -1
    whole = op.get_attr("begin_mask") & op.get_attr("end_mask") & 1
    return (
        not whole and not op.get_attr("ellipsis_mask") & 1 and not op.get_attr("new_axis_mask") & 1
    )


def static_rows() -> int | None:
    """Return the number of rows that this replica holds; None if the graph does not know it."""
    first = next(x for x in tf.nest.flatten(current.batch) if hasattr(x, "shape"))
    return first.shape[0] if first.shape.rank else None


def of_elements(x: tf.Tensor) -> Share:
    """Return this replica's share of the elements of all replicas' ``x``.

    Most often it is equal to the share of the rows, which is known. Otherwise replicas add up how
    many elements they hold.
    """
    of_rows: Share = current.count
    if tf.executing_eagerly():
        return of_rows
    several_unknown = x.shape.rank is None or [*x.shape].count(None) > 1
    bits = bits_of(x)
    if several_unknown or bits & RESIZES:
        return of_divisor(tf.size(x, tf.int64))
    uniform, of_others = current.rows.uniform, current.rows.of_others
    if uniform is None or bits & _ANY == _FIRST:
        return of_rows
    for place, held in enumerate(of_others[: _TOLD_APART - 1], 1):
        if bits & _ANY == _FIRST << place:
            return Share(int(of_rows), *held)

    def counted() -> tuple[tf.Tensor, tf.Tensor]:
        share = of_divisor(tf.size(x, tf.int64))
        return share._local, share._total

    held = tf.cond(uniform, lambda: (of_rows._local, of_rows._total), counted)
    return Share(int(of_rows), *held)


def of_divisor(divisor: tf.Tensor, total: tf.Tensor | None = None) -> Share:
    """Return this replica's share of the divisor of a loss.

    Args:
        divisor: this replica's divisor.
        total: the whole batch's divisor, if it is not the sum of the replicas' divisors.
    """
    held = current.rows.counted(divisor)
    return Share(int(current.count), held, summed(divisor) if total is None else total)


def summed(x: tf.Tensor) -> tf.Tensor:
    """Return the sum over all replicas that hold rows."""
    return tf.distribute.get_replica_context().all_reduce("SUM", current.rows.counted(x))
