"""Shards of tensors: each rank holds one part of a tensor.

A shard of n numbers holds n / P of them, rounded up; zeros fill up the last shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf


def size(shape: Sequence[int], ranks: int) -> int:
    """Return the number of elements in one shard of a tensor of this shape."""
    return -(-math.prod(shape) // ranks)


def split(x: tf.Tensor, ranks: int) -> tf.Tensor:
    """Return all shards of a tensor of known shape, one row for each rank."""
    each = size(x.shape, ranks)
    missing = ranks * each - x.shape.num_elements()
    filled = tf.pad(tf.reshape(x, [-1]), [[0, missing]]) if missing else x
    return tf.reshape(filled, [ranks, each])


def join(shards: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Return the tensor of this shape, joined from all its shards."""
    numbers = math.prod(shape)
    if shards.shape.num_elements() != numbers:
        shards = tf.reshape(shards, [-1])[:numbers]
    return tf.reshape(shards, shape)
