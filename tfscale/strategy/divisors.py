"""What numbers of a step divide by, read from the graph: whether that is the same on all replicas.

A replica that divides by its own number of samples, by the sum of its mask or by the size of an
axis computes a part of what one device computes. This module finds the divisor of the whole batch.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tfscale.strategy import share
from tfscale.strategy.share import BATCH, SCALES, TURNS, bits_of

DIVIDES = ("RealDiv", "DivNoNan", "Div")
REDUCES = ("Sum", "Mean")
_KEEPS_DIVISOR = ("Cast", "Identity", "Reshape", "Squeeze", "ExpandDims")
_COMPUTES_DIVISOR = {
    **{"Maximum": tf.maximum, "Mul": tf.multiply, "RealDiv": tf.divide},
    **dict.fromkeys(("AddV2", "Add"), tf.add),
}
_OF_SHAPES = ("Mul", "Prod", "StridedSlice", "AddV2", "Sub", *_KEEPS_DIVISOR)


def varies(tensor: tf.Tensor) -> bool:
    """Return whether a tensor depends on the batch, or on what this replica holds of it."""
    return bool(bits_of(tensor) & (BATCH | SCALES))


def reduces_the_batch(tensor: tf.Tensor) -> bool:
    """Return whether a reduction joins the samples of a batch, and not the numbers of each.

    Samples lie along the one size that the graph does not know; otherwise along the first axis,
    unless something has moved it.
    """
    x, axes = tensor.op.inputs
    axes, rows, rank = tf.get_static_value(axes), share.static_rows(), x.shape.rank
    if axes is None or rank is None or not bits_of(x) & BATCH:
        return False
    reduced = {int(axis) % rank for axis in axes.reshape([-1])}
    unknown = {axis for axis, size in enumerate(x.shape) if size is None}
    if rows is None and len(unknown) <= 1:
        return bool(unknown & reduced)
    if len(reduced) < rank and (0 not in reduced or bits_of(x) & TURNS):
        return False
    sizes = [x.shape[axis] for axis in (reduced if len(reduced) == rank else [0])]
    return None in sizes or (rows is not None and math.prod(sizes) % rows == 0)


def is_same_everywhere(divisor: tf.Tensor) -> bool:
    """Return whether all replicas divide by the same number.

    That is a constant, or made of the sizes of a batch but for its rows.
    """
    if not varies(divisor):
        return True
    op = divisor.op
    if op.type == "StridedSlice" and op.inputs[0].op.type == "Shape":
        rank, begin = op.inputs[0].op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
        masks = op.get_attr("begin_mask") | op.get_attr("ellipsis_mask")
        if rank is None or begin is None or begin.size != 1 or masks:
            return False
        return bool(begin[0] % rank != 0)
    of_shapes = op.type in _OF_SHAPES or op.type in DIVIDES
    return of_shapes and all(map(is_same_everywhere, op.inputs))


def is_of_replicas(divisor: tf.Tensor) -> bool:
    """Return whether the divisor of the whole batch can be computed from those of replicas."""
    op = divisor.op
    if op.type in _KEEPS_DIVISOR:
        return is_of_replicas(op.inputs[0])
    if op.type in _COMPUTES_DIVISOR:
        differing = [x for x in op.inputs if not is_same_everywhere(x)]
        if op.type == "RealDiv" and not is_same_everywhere(op.inputs[1]):
            return False
        alone = len(differing) == 1 or op.type in ("AddV2", "Add")
        return alone and all(map(is_of_replicas, differing))
    if op.type in REDUCES:
        return reduces_the_batch(divisor) or is_of_replicas(op.inputs[0])
    if op.type == "StridedSlice":
        begin = tf.get_static_value(op.inputs[1])
        first = begin is not None and begin.size == 1 and begin[0] == 0
        return bool(first and divisor.shape.rank == 0 and op.inputs[0].op.type == "Shape")
    return bool(op.type == "Size" or (op.type == "Prod" and op.inputs[0].op.type == "Shape"))


def whole_divisor(divisor: tf.Tensor) -> tf.Tensor:
    """Return what a ratio divides by for the whole batch.

    What is the same everywhere counts once, a mean is that of all elements, and the rest is summed
    over replicas.
    """
    op = divisor.op
    if is_same_everywhere(divisor):
        return divisor
    if op.type in _KEEPS_DIVISOR:
        return tf.reshape(tf.cast(whole_divisor(op.inputs[0]), divisor.dtype), tf.shape(divisor))
    if op.type in _COMPUTES_DIVISOR:
        return _COMPUTES_DIVISOR[op.type](*map(whole_divisor, op.inputs))
    if op.type in REDUCES and not reduces_the_batch(divisor):  # this only adds up what did
        reduce = tf.reduce_sum if op.type == "Sum" else tf.reduce_mean
        whole = reduce(whole_divisor(op.inputs[0]), op.inputs[1], op.get_attr("keep_dims"))
        return tf.cast(whole, divisor.dtype)
    if op.type == "Mean":
        weight = share.of_elements(op.inputs[0]).weight(divisor.dtype)
        divisor = tf.math.multiply_no_nan(divisor, weight)
    return share.summed(divisor)
