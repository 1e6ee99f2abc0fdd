"""Tensors of which each rank holds a part: its shard.

Of n numbers a shard has n / P, rounded up; zeros fill the last ones up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf


def size(shape: Sequence[int], ranks: int) -> int:
    """How many numbers a shard has of a tensor of that shape."""
    return -(-math.prod(shape) // ranks)


def split(x: tf.Tensor, ranks: int) -> tf.Tensor:
    """All shards of a tensor of known shape, a row for each rank."""
    each = size(x.shape, ranks)
    missing = ranks * each - x.shape.num_elements()
    filled = tf.pad(tf.reshape(x, [-1]), [[0, missing]]) if missing else x
    return tf.reshape(filled, [ranks, each])


def join(shards: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """The tensor of that shape, of all its shards."""
    numbers = math.prod(shape)
    if shards.shape.num_elements() != numbers:
        shards = tf.reshape(shards, [-1])[:numbers]
    return tf.reshape(shards, shape)
