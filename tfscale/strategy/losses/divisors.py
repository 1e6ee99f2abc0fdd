"""Divisors in a step's graph, and the divisors that the whole batch has in their place.

A replica may divide by its own number of samples, by the sum of its mask, or by the size of an
axis. One device would divide by the value for the whole batch. This module finds that value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.strategy.share import RESTORES, SCALES
from tfscale.strategy.step import this_step
from tfscale.strategy.step_graph import BATCH, TURNS

DIVIDES = ("RealDiv", "DivNoNan", "Div")
REDUCES = ("Sum", "Mean")
_KEEPS_DIVISOR = ("Cast", "Identity", "Reshape", "Squeeze", "ExpandDims")
_COMPUTES_DIVISOR = {
    **{"Maximum": tf.maximum, "Mul": tf.multiply, "RealDiv": tf.divide},
    **dict.fromkeys(("AddV2", "Add"), tf.add),
}
_OF_SHAPES = ("Mul", "Prod", "StridedSlice", "AddV2", "Sub", *_KEEPS_DIVISOR)


def varies(tensor: tf.Tensor) -> bool:
    """Return whether a tensor depends on the batch, or on this replica's share of the batch."""
    return this_step().graph.depends_on(BATCH | SCALES | RESTORES, tensor)


def constant(tensor: tf.Tensor) -> Any:
    """Return the value of a tensor that is computed from constants alone; None for others.

    ``tf.shape(x)`` is a constant where the shape is known, and TensorFlow does not compute further.
    """
    value, op = tf.get_static_value(tensor), tensor.op
    if value is not None or op.type not in _OF_CONSTANTS:
        return value
    inputs = [constant(x) for x in op.inputs]
    return None if any(x is None for x in inputs) else _OF_CONSTANTS[op.type](op, *inputs)


def _sliced(op: tf.Operation, x: Any, begin: Any, end: Any, stride: Any) -> Any:
    if begin.size != 1 or op.get_attr("ellipsis_mask") or op.get_attr("new_axis_mask"):
        return None
    if op.get_attr("shrink_axis_mask"):
        return np.asarray(x[begin[0]])
    first = None if op.get_attr("begin_mask") else begin[0]
    return x[first : None if op.get_attr("end_mask") else end[0] : stride[0]]


_OF_CONSTANTS: dict[str, Callable[..., Any]] = {
    "Cast": lambda op, x: np.asarray(x).astype(op.outputs[0].dtype.as_numpy_dtype),
    "StridedSlice": _sliced,
    "Prod": lambda op, x, axes: np.asarray(np.prod(x, tuple(np.ravel(axes)))),
    "Identity": lambda op, x: x,
    "Mul": lambda op, x, y: np.asarray(x * y),
    "AddV2": lambda op, x, y: np.asarray(x + y),
    "Sub": lambda op, x, y: np.asarray(x - y),
    "Maximum": lambda op, x, y: np.maximum(x, y),
    **dict.fromkeys(DIVIDES, lambda op, x, y: np.asarray(x / y) if np.all(y) else None),
}


def reduces_the_batch(tensor: tf.Tensor) -> bool:
    """Return whether a reduction runs over the samples of a batch, not only within each sample.

    Samples lie along the axis whose size the graph does not know, if there is exactly one. Else
    they lie along the first axis, unless an operation has moved it.
    """
    x, axes = tensor.op.inputs
    axes, graph, rank = tf.get_static_value(axes), this_step().graph, x.shape.rank
    if axes is None or rank is None or not graph.depends_on(BATCH, x):
        return False
    reduced = {int(axis) % rank for axis in axes.reshape([-1])}
    unknown = {axis for axis, size in enumerate(x.shape) if size is None}
    rows = graph.static_rows
    if rows is None and len(unknown) <= 1:
        return bool(unknown & reduced)
    if len(reduced) < rank and (0 not in reduced or graph.depends_on(TURNS, x)):
        return False
    sizes = [x.shape[axis] for axis in (reduced if len(reduced) == rank else [0])]
    return None in sizes or (rows is not None and math.prod(sizes) % rows == 0)


def is_same_everywhere(divisor: tf.Tensor) -> bool:
    """Return whether all replicas divide by the same number.

    Such a divisor is a constant, or is computed from sizes of the batch other than its rows.
    """
    if not varies(divisor):
        return True
    op = divisor.op
    if op.type == "StridedSlice" and _sized(op) is not None:
        return _axis_of_size(op) not in (None, 0)
    of_shapes = op.type in _OF_SHAPES or op.type in DIVIDES
    return of_shapes and all(map(is_same_everywhere, op.inputs))


def _axis_of_size(op: tf.Operation) -> int | None:
    """Return the axis whose size an operation takes from a shape; None if it is not known.

    It is the axis that it was before the tensor was transposed: rows lie along the first one.
    """
    x, begin = op.inputs[0].op.inputs[0], tf.get_static_value(op.inputs[1])
    masks = op.get_attr("begin_mask") | op.get_attr("ellipsis_mask")
    if x.shape.rank is None or begin is None or begin.size != 1 or masks:
        return None
    axis: int = int(begin[0]) % x.shape.rank
    while x.op.type in ("Transpose", "Identity", "Cast"):
        if x.op.type == "Transpose":
            order = tf.get_static_value(x.op.inputs[1])
            if order is None:
                return None
            axis = int(order[axis])
        x = x.op.inputs[0]
    return axis


def is_of_replicas(divisor: tf.Tensor) -> bool:
    """Return whether the divisor of the whole batch follows from the replicas' divisors."""
    return _follows(divisor, tuple(_COMPUTES_DIVISOR), REDUCES)


def is_count(number: tf.Tensor) -> bool:
    """Return whether the batch's whole number is the sum of the replicas' numbers.

    It is for a sum over samples, as of correct predictions, and for the number of rows.
    """
    return _follows(number, ("Mul",), ("Sum",))


def _follows(number: tf.Tensor, computes: Collection[str], reduces: Collection[str]) -> bool:
    op = number.op
    if op.type in _KEEPS_DIVISOR:
        return _follows(op.inputs[0], computes, reduces)
    if op.type in computes:
        differing = [x for x in op.inputs if not is_same_everywhere(x)]
        if op.type == "RealDiv" and not is_same_everywhere(op.inputs[1]):
            return False
        alone = len(differing) == 1 or op.type in ("AddV2", "Add")
        return alone and all(_follows(x, computes, reduces) for x in differing)
    if op.type in reduces:
        return reduces_the_batch(number) or _follows(op.inputs[0], computes, reduces)
    if _sized(op) is None:
        return False
    return op.type != "StridedSlice" or (number.shape.rank == 0 and _axis_of_size(op) == 0)


def whole_divisor(divisor: tf.Tensor) -> tf.Tensor:
    """Return the divisor that a ratio has for the whole batch.

    A part that is the same on all replicas counts once. A mean becomes the mean over all
    elements. All other parts are summed over replicas.
    """
    op = divisor.op
    if is_same_everywhere(divisor):
        return divisor
    if op.type in _KEEPS_DIVISOR:
        return tf.reshape(tf.cast(whole_divisor(op.inputs[0]), divisor.dtype), tf.shape(divisor))
    if op.type in _COMPUTES_DIVISOR:
        return _COMPUTES_DIVISOR[op.type](*map(whole_divisor, op.inputs))
    if op.type in REDUCES and not reduces_the_batch(divisor):  # an input has reduced it
        reduce = tf.reduce_sum if op.type == "Sum" else tf.reduce_mean
        whole = reduce(whole_divisor(op.inputs[0]), op.inputs[1], op.get_attr("keep_dims"))
        return tf.cast(whole, divisor.dtype)
    step, sized = this_step(), _sized(op)
    if step.is_microbatch and sized is not None:
        return step.size_in_batch(divisor, sized)
    step.refuse_microbatches()
    if op.type == "Mean":
        weight = step.share_of_elements(op.inputs[0]).weight(divisor.dtype)
        return step.sum_over_rows(tf.math.multiply_no_nan(divisor, weight))
    return step.sum_of_batch(divisor)


def _sized(op: tf.Operation) -> tf.Tensor | None:
    """Return the tensor whose rows or elements an operation counts; None if it counts none."""
    if op.type == "Size":
        return op.inputs[0]
    if op.type in ("StridedSlice", "Prod") and op.inputs[0].op.type == "Shape":
        return op.inputs[0].op.inputs[0]
    return None
