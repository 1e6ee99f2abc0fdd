r"""Arithmetic that integers and real numbers do alike: dyadic factors and a fixed-point grid.

A dyadic number is :math:`b \cdot 2^{-c}` with a whole :math:`b` of 20 bits. An accumulator of 32
bits times a dyadic number is exact in float64, and so is half of it more. So rounding to whole
numbers gives the same in float64 as in integers, where it is a product and a shift (HAWQ-V3,
https://arxiv.org/abs/2011.10680).

Between layers travel whole numbers of a *grid* of step :math:`2^{-k}`, of at most 23 bits: float32
holds them exactly, and sums of a few of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

BITS = 20  # of a dyadic number's b
COARSE_BITS = 12  # of a learned scale
GRID_BITS = 23  # of a number on the grid, with its sign
_DROPPED = 53 - BITS  # bits of a float64's fraction that a dyadic number does not have
LARGEST_ON_GRID = float(2 ** (GRID_BITS - 1) - 1)
_LARGEST_SHIFT = 62


def dyadic(factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``b`` and ``c`` of the dyadic numbers ``b * 2 ** -c`` next to positive numbers."""
    bits = np.asarray(factor, np.float64).view(np.int64)
    kept = (bits + (1 << (_DROPPED - 1))) & ~((1 << _DROPPED) - 1)
    fraction, exponent = np.frexp(kept.view(np.float64))
    return (fraction * 2.0**BITS).astype(np.int64), (BITS - exponent).astype(np.int64)


def dyadic_tensor(factor: Any) -> Any:
    """Return the dyadic numbers next to positive float64 tensors, with the gradient of identity."""
    bits = tf.bitcast(factor, tf.int64)
    half = tf.constant(1 << (_DROPPED - 1), tf.int64)
    mask = tf.constant(~((1 << _DROPPED) - 1), tf.int64)
    kept = tf.bitcast(tf.bitwise.bitwise_and(bits + half, mask), tf.float64)
    return factor + tf.stop_gradient(kept - factor)


def coarse(scale: Any) -> Any:
    """Return the numbers of 12 bits next to positive float32 tensors; they have no gradient."""
    bits = tf.bitcast(scale, tf.int32)
    dropped = 24 - COARSE_BITS
    kept = tf.bitwise.bitwise_and(bits + (1 << (dropped - 1)), ~((1 << dropped) - 1))
    return tf.bitcast(kept, tf.float32)


def rescaled(numbers: np.ndarray, factor: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Return whole numbers times a dyadic number, rounded half up: a product and a shift."""
    b, c = factor
    shift = np.clip(c, 0, _LARGEST_SHIFT)
    products = (numbers.astype(np.int64) * b) << np.maximum(-c, 0)
    half = np.where(shift > 0, np.int64(1) << np.maximum(shift - 1, 0), 0)
    return np.asarray((products + half) >> shift)


def round_half_up(x: Any) -> Any:
    """Round a tensor to whole numbers, with the gradient of identity."""
    return x + tf.stop_gradient(tf.floor(x + 0.5) - x)


def on_grid(x: Any, step: Any) -> Any:
    """Return a tensor as whole numbers of a grid, in float64, clipped to what the grid holds."""
    wide = tf.cast(x, tf.float64) / tf.cast(step, tf.float64)  # exact: the step is a power of two
    return tf.clip_by_value(round_half_up(wide), -LARGEST_ON_GRID, LARGEST_ON_GRID)


def off_grid(numbers: Any, step: Any, dtype: Any) -> Any:
    """Return the real numbers that whole numbers of a grid stand for."""
    return tf.cast(numbers * tf.cast(step, tf.float64), dtype)


def grid_step(largest: float) -> float:
    """Return the step of a grid on which four times ``largest`` is a number."""
    if not largest > 0:
        return 1.0
    _, exponent = np.frexp(float(largest))
    return float(2.0 ** (int(exponent) + 2 - (GRID_BITS - 1)))
