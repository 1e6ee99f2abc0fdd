"""Norms of whole gradients, and whether all are finite, from the parts that replicas hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.exchange.rows import numbers_of
from tfscale.exchange.team import Team


def clipped(
    team: Team, is_even: bool, clip: Callable[..., list[Any]], optimizer: Any, grads: Sequence[Any]
) -> list[Any]:
    """Return clipped parts of gradients; norms are those of whole gradients.

    Replicas add up the squares of their parts. A number of a row that occurs twice counts twice, as
    in Keras.

    Args:
        team: team of the replicas.
        is_even: whether each replica holds a part of each gradient.
        clip: the optimizer's own method, for what one gradient is enough for.
        optimizer: the optimizer.
        grads: this replica's parts.
    """
    squares = [tf.reduce_sum(tf.square(numbers_of(g))) for g in grads]
    if optimizer.global_clipnorm:
        total = summed_numbers(team, [_added(squares)], "square of the global norm")
        return by_global_norm(optimizer, grads, total)
    if optimizer.clipnorm and is_even:
        return by_norms(optimizer, grads, summed_numbers(team, squares, "squares of norms"))
    return clip(optimizer, grads)


def clipped_by_squares(
    optimizer: Any, grads: Sequence[Any], squares: Sequence[tf.Tensor]
) -> list[Any]:
    """Return gradients clipped by norm or by global norm.

    Args:
        optimizer: the optimizer, which clips in one of the two ways.
        grads: gradients, or parts of gradients.
        squares: sums of the squares of the whole gradients.
    """
    if optimizer.global_clipnorm:
        return by_global_norm(optimizer, grads, squares)
    return by_norms(optimizer, grads, squares)


def by_global_norm(optimizer: Any, grads: Sequence[Any], squares: Sequence[tf.Tensor]) -> list[Any]:
    """Return gradients clipped by their global norm, whose square is the sum of ``squares``."""
    total = _added(squares)
    # NaN if the norm is not finite, as in Keras.
    factor = _factor(total, optimizer.global_clipnorm) + (total - total)
    return [tf.convert_to_tensor(g) * tf.cast(factor, g.dtype) for g in grads]


def by_norms(optimizer: Any, grads: Sequence[Any], squares: Sequence[tf.Tensor]) -> list[Any]:
    """Return gradients clipped each by its own norm, whose square is given."""
    factors = [_factor(square, optimizer.clipnorm) for square in squares]
    return [_times(g, f) for g, f in zip(grads, factors, strict=True)]


def finite_on_all(
    team: Team, check: Callable[..., Any], optimizer: Any, grads: Sequence[Any]
) -> tf.Tensor:
    """Return whether the parts of all replicas are finite."""
    broken = tf.cast(tf.logical_not(check(optimizer, grads)), tf.int32)
    (total,) = summed_numbers(team, [broken], "gradients that are not finite")
    return tf.equal(total, 0)


def summed_numbers(team: Team, values: list[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Return the sums of numbers over a team."""
    return team.together(lambda replica, own: team.sum_all(replica, own, name), values)


def _added(squares: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the sum of numbers of several types, in float32 unless one is a float64."""
    wide = tf.float64 if tf.float64 in {each.dtype for each in squares} else tf.float32
    return tf.add_n([tf.cast(each, wide) for each in squares])


def _factor(square: tf.Tensor, limit: float) -> tf.Tensor:
    """Return the factor that makes a norm at most the limit."""
    limit = tf.constant(limit, square.dtype)
    return limit / tf.maximum(tf.sqrt(square), limit)


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    factor = tf.cast(factor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
