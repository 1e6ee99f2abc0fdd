"""Random numbers that depend on a sample, not on its place in a batch or on a replica.

They are computed from the sample's own values and a number, such as that of the step. So an attack
chooses the same samples, and moves them to the same places, however many replicas share a batch. No
generator's state changes.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_BITS = 0xFFFFFFFF
_ODD = 0x45D9F3B  # spreads bits well when numbers are multiplied by it


def row_keys(inputs: list[Any], number: Any) -> Any:
    """Return 32 bits in an int64 for each row of all inputs together."""
    keys = _mixed(tf.cast(number, tf.int64))
    for place, x in enumerate(inputs):
        flat = tf.reshape(tf.cast(x, tf.float32), [tf.shape(x)[0], -1])
        bits = tf.cast(tf.bitcast(flat, tf.int32), tf.int64) & _BITS
        columns = _mixed(tf.range(tf.shape(flat)[1], dtype=tf.int64) + 1)
        keys = _mixed(keys + place + tf.reduce_sum(_mixed(bits ^ columns), axis=1))
    return keys


def uniform(keys: Any) -> Any:
    """Return numbers from 0 to 1, excluding 1."""
    return tf.cast(_down(_mixed(keys + 1), 8), tf.float32) * 2.0**-24


def spread(keys: Any, like: Any) -> Any:
    """Return numbers from -1 to 1 in a tensor's shape; the key of a row determines its numbers."""
    flat = tf.reshape(like, [tf.shape(like)[0], -1])
    columns = _mixed(tf.range(tf.shape(flat)[1], dtype=tf.int64) + 1)
    draws = 2 * uniform(keys[:, tf.newaxis] ^ columns) - 1
    return tf.cast(tf.reshape(draws, tf.shape(like)), like.dtype)


def _mixed(x: Any) -> Any:
    """Return 32 bits, each of which depends on all bits of the input."""
    x &= _BITS
    for _ in range(2):
        x = ((x ^ _down(x, 16)) * _ODD) & _BITS
    return x ^ _down(x, 16)


def _down(x: Any, bits: int) -> Any:
    return tf.bitwise.right_shift(x, tf.constant(bits, tf.int64))
