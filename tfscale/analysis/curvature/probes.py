"""Random signs: the probe vectors of estimators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

_PLACES = np.arange(32, dtype=np.uint32)
_SIGN = np.uint32(0x80000000)
_ONE = np.uint32(0x3F800000)  # the bits of 1.0 in float32


def signs(shape: Any, dtype: Any, name: tuple[int, ...], step: Any) -> tf.Tensor:
    """Return independent signs, each 1 or -1 with the same probability.

    The signs depend on the arguments alone: not on the device, the replica, the program's other
    random numbers, or the number of earlier calls. So all replicas draw the same signs, and a
    training that resumes from a checkpoint draws the signs that it would have drawn.

    Args:
        shape: shape of the result.
        dtype: type of the result.
        name: numbers that tell these signs from others of the same step.
        step: step of the training, a scalar that may be a tensor.
    """
    key = int(np.random.SeedSequence(name).generate_state(1, np.uint64)[0] >> np.uint64(1))
    seed = tf.stack([tf.constant(key, tf.int64), tf.cast(step, tf.int64)])
    size = math.prod(shape)
    # Name the algorithm, since TensorFlow's default depends on the device.
    words = tf.random.stateless_uniform(
        [-(-size // 32), 1], seed, None, None, tf.uint32, alg="philox"
    )
    # Each of the 32 random bits of a number becomes the sign of a one.
    moved = tf.bitwise.left_shift(words, _PLACES)
    ones = tf.bitcast((moved & _SIGN) | _ONE, tf.float32)
    return tf.cast(tf.reshape(tf.reshape(ones, [-1])[:size], shape), dtype)
