"""Norms of whole gradients, and whether all are finite, from the parts that replicas hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.exchange.rows import numbers_of, with_numbers
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
        squares = summed_numbers(team, [_added(squares)], "square of the global norm")
    elif optimizer.clipnorm and is_even:
        squares = summed_numbers(team, squares, "squares of norms")
    else:
        return clip(optimizer, grads)
    return clipped_by_squares(optimizer, grads, squares)


def clipped_by_squares(
    optimizer: Any, grads: Sequence[Any], squares: Sequence[tf.Tensor]
) -> list[Any]:
    """Return gradients clipped by norm or by global norm.

    Args:
        optimizer: the optimizer, which clips in one of the two ways.
        grads: gradients, or parts of gradients.
        squares: sums of the squares of the whole gradients; for a global norm, its square is the
            sum of these.
    """
    if optimizer.global_clipnorm:
        total = _added(squares)
        # NaN if the norm is not finite, as in Keras.
        factor = _factor(total, optimizer.global_clipnorm) + (total - total)
        return [tf.convert_to_tensor(g) * tf.cast(factor, g.dtype) for g in grads]
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
    return with_numbers(gradient, lambda x: x * tf.cast(factor, x.dtype))
