"""Dependences of a step's tensors: on the batch, on random numbers, on a replica's share.

Eager steps have no graph: callers treat them by rules of their own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.exchange import dataflow
from tfscale.strategy.batch.rows import is_batch
from tfscale.strategy.share import RESTORES, SCALES, marks_of

# Bits of an operation, besides SCALES and RESTORES, which all operations that depend on it inherit.
# The bits from ``_FIRST`` on say on which tensors of the batch an operation depends; the last bit
# stands for all tensors after the first ``_DISTINGUISHED``.
BATCH, RESIZES, TURNS, _FIRST = 4, 8, 16, 32
_DISTINGUISHED = 16
_SAMPLES, _CHANCE = 1, 2  # where values come from that differ between replicas
_ANY = ((1 << _DISTINGUISHED + 1) - 1) * _FIRST

# Operations whose results have a number of rows that depends on the values of the data.
_RESIZING = (
    *("Where", "Unique", "UniqueV2", "UniqueWithCounts", "DynamicPartition", "ListDiff"),
    *("NonMaxSuppressionV3", "NonMaxSuppressionV4", "PartitionedCall", "StatefulPartitionedCall"),
)


# Operations whose results have the rows of the sparse tensor that they get the parts of.
_MAKES_ROWS = (
    *("SparseToDense", "SparseTensorDenseMatMul", "SparseReduceSum", "SparseReduceMax"),
    *("SegmentSum", "SegmentSumV2", "SegmentMean", "SegmentMax", "UnsortedSegmentSum"),
    *("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN"),
)

_SUMS_OF_REPLICAS = ("TfscaleAllReduce", "CollectiveReduce", "CollectiveReduceV2")


class StepGraph:
    """Graph of one replica's step.

    Args:
        data: this replica's part of the batch.
    """

    def __init__(self, data: Any = ()) -> None:
        self._data = data
        # The operations that give the tensors of the batch, with the tensors' positions.
        self._places = {} if tf.executing_eagerly() else _places(data)
        self._flat = {} if tf.executing_eagerly() else _places(_composites(data))
        self._bits: dict[Any, int] = {}  # caches
        self._origins: dict[Any, int] = {}
        self._samples: dict[Any, int] = {}

    @property
    def static_rows(self) -> int | None:
        """Number of rows that this replica holds; None if the graph does not know it."""
        first = next(x for x in tf.nest.flatten(self._data) if hasattr(x, "shape"))
        return first.shape[0] if first.shape.rank else None

    def is_graph_of_batch(self, graph: tf.Graph) -> bool:
        """Return whether a graph is that of the step itself, and not one of a branch or a loop."""
        return any(op.graph is graph for op in self._places)

    def gives_batch(self, op: tf.Operation) -> bool:
        """Return whether an operation gives a tensor of the batch."""
        return op in self._places

    def bits_of(self, tensors: Sequence[tf.Tensor]) -> list[int]:
        """Return for each traced tensor the bits of the operations that it is computed from."""

        def own(op: tf.Operation) -> int:
            marks = marks_of(op) | _marks_within(op) | self._given(op)
            return marks | RESIZES * (op in self._flat or _resizes(op)) | TURNS * _turns(op)

        def hides(op: tf.Operation, source: tf.Tensor) -> int:
            return RESIZES * (op.type in _MAKES_ROWS or _gets_other_rows(op, source))

        return dataflow.gathered(tensors, own, self._bits, hides)

    def has_samples(self, tensor: tf.Tensor) -> bool:
        """Return whether a traced tensor depends on this replica's samples, but for its sums.

        A sum over replicas holds no samples of this one.
        """

        def hides(op: tf.Operation, _: tf.Tensor) -> int:
            return int(op.type in _SUMS_OF_REPLICAS)

        (found,) = dataflow.gathered(
            [tensor], lambda op: int(bool(self._given(op))), self._samples, hides
        )
        return bool(found)

    def depends_on(self, bits: int, tensor: tf.Tensor) -> bool:
        """Return whether a traced tensor depends on an operation with one of these bits."""
        return bool(self.bits_of([tensor])[0] & bits)

    def are_scaled(self, tensors: Sequence[tf.Tensor]) -> list[bool]:
        """Return which losses, or gradients of losses, have a replica's share as a factor.

        A loss that was scaled and then scaled back counts as not scaled.
        """
        return [bits & (SCALES | RESTORES) in (SCALES, RESTORES) for bits in self.bits_of(tensors)]

    def source_of(self, x: tf.Tensor) -> int | None:
        """Return the position of the only tensor of the batch whose rows ``x`` has.

        None means that ``x`` depends on several tensors of the batch, or on none.
        """
        bits = self.bits_of([x])[0] & _ANY
        place = bits.bit_length() - _FIRST.bit_length()
        return place if bits == _FIRST << max(place, 0) and place < _DISTINGUISHED else None

    def is_of_one_replica(self, value: Any) -> bool:
        """Return whether a value depends on one replica's samples or random numbers.

        Eager values have no graph that shows this, so the answer is True.
        """
        return tf.executing_eagerly() or self._origin(value) != 0

    def is_random(self, value: Any) -> bool:
        """Return whether a traced value depends on random numbers, and not on samples."""
        return not tf.executing_eagerly() and self._origin(value) == _CHANCE

    def _origin(self, value: Any) -> int:
        parts = tf.nest.flatten(value, expand_composites=True)
        tensors = [x for x in parts if isinstance(x, tf.Tensor)]

        def own(op: tf.Operation) -> int:
            return _SAMPLES * (op in self._places) | _CHANCE * dataflow.is_random(op)

        return functools.reduce(operator.or_, dataflow.gathered(tensors, own, self._origins), 0)

    def _given(self, op: tf.Operation) -> int:
        """Return the bits of the batch's tensor that an operation gives; 0 if it gives none."""
        if op in self._places:
            return BATCH | _FIRST << min(self._places[op], _DISTINGUISHED)
        return (BATCH | _ANY) * self._is_argument(op)

    def _is_argument(self, op: tf.Operation) -> bool:
        """Return whether an operation is an argument of a function or a loop within the step.

        Such an argument may depend on the batch. All arguments of the step's own graph, except the
        batch, are the same on all replicas.
        """
        if op.type != "Placeholder" or dataflow.is_captured(op):
            return False
        return all(op.graph is not given.graph for given in self._places)


def _composites(data: Any) -> list[Any]:
    """Return sparse and ragged tensors: their values have one row for each number, not sample."""
    return [x for x in tf.nest.flatten(data) if is_batch(x) and not isinstance(x, tf.Tensor)]


def _places(data: Any) -> dict[tf.Operation, int]:
    whole = [x for x in tf.nest.flatten(data) if is_batch(x)]
    return {
        tensor.op: place
        for place, one in enumerate(whole)
        for tensor in tf.nest.flatten(one, expand_composites=True)
        if tf.is_tensor(tensor)
    }


def _marks_within(op: tf.Operation) -> int:
    """Return the marks within the function, the branches or the loop that an operation runs."""
    marks = 0
    for graph in dataflow.called_graphs(op):
        for inner in graph.get_operations():
            marks |= marks_of(inner) | _marks_within(inner)
    return marks


def _resizes(op: tf.Operation) -> bool:
    return op.type in _RESIZING or op.type.startswith("Ragged") or _cuts_rows(op)


def _gets_other_rows(op: tf.Operation, source: tf.Tensor) -> bool:
    """Return whether an operation gives an input the rows of another tensor, whose shape it gets.

    So experts give the results of their rows the shape of the layer's input.
    """
    return op.type == "Reshape" and source is op.inputs[0] and op.inputs[1].op.type == "Shape"


def _turns(op: tf.Operation) -> bool:
    """Return whether an operation may move the first axis, along which samples lie."""
    if op.type != "Transpose":
        return False
    axes = tf.get_static_value(op.inputs[1])
    return axes is None or bool(axes.size > 0 and axes[0] != 0)


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
        return begin is None or size is None or bool(begin[0] != 0 or size[0] != -1)
    whole = op.get_attr("begin_mask") & op.get_attr("end_mask") & 1
    return (
        not whole and not op.get_attr("ellipsis_mask") & 1 and not op.get_attr("new_axis_mask") & 1
    )
