"""Norms of whole gradients, and whether all are finite, from the parts that replicas hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

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
    squares = [tf.reduce_sum(tf.square(_numbers(g))) for g in grads]
    if optimizer.global_clipnorm:
        squares = [tf.cast(each, tf.float32) for each in squares]
        (total,) = _summed(team, [tf.add_n(squares)], "square of the global norm")
        # NaN if the norm is not finite, as in Keras.
        factor = _factor(total, optimizer.global_clipnorm) + (total - total)
        return [tf.convert_to_tensor(g) * tf.cast(factor, g.dtype) for g in grads]
    if optimizer.clipnorm and is_even:
        totals = _summed(team, squares, "squares of norms")
        factors = [_factor(total, optimizer.clipnorm) for total in totals]
        return [_times(g, f) for g, f in zip(grads, factors, strict=True)]
    return clip(optimizer, grads)


def finite_on_all(
    team: Team, check: Callable[..., Any], optimizer: Any, grads: Sequence[Any]
) -> tf.Tensor:
    """Return whether the parts of all replicas are finite."""
    broken = tf.cast(tf.logical_not(check(optimizer, grads)), tf.int32)
    (total,) = _summed(team, [broken], "gradients that are not finite")
    return tf.equal(total, 0)


def _summed(team: Team, values: list[tf.Tensor], name: str) -> list[tf.Tensor]:
    return team.together(lambda replica, own: team.sum_all(replica, own, name), values)


def _factor(square: tf.Tensor, limit: float) -> tf.Tensor:
    """Return the factor that makes a norm at most the limit."""
    limit = tf.cast(limit, square.dtype)
    return limit / tf.maximum(tf.sqrt(square), limit)


def _numbers(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    factor = tf.cast(factor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
