"""Statistics of layers, computed from the global batch or averaged over replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.objects import reduced_axes
from tfscale.bridge.protocols import Layer
from tfscale.bridge.tensorflow import own_copy, sum_without_gradient
from tfscale.strategy.current import current, during
from tfscale.strategy.share import Share, is_scaled


def moments(
    _: Callable[..., Any], layer: Layer, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the mean and the variance of the global batch, for batch normalization.

    They are computed in two passes. The mean of squares minus the square of the mean would lose
    digits: the larger the mean is relative to the deviation, the more. The two passes need two
    exchanges, and one for the gradient; Keras makes three, and three for the gradient. A network
    may have hundreds of such layers, and most of the cost of an operation is tracing it. So this
    function uses few operations, and defines its own gradient.
    """
    axes = [*reduced_axes(layer)]
    if mask is not None:
        mask = tf.cast(tf.broadcast_to(mask[..., tf.newaxis], tf.shape(inputs)), tf.bool)

    def along_channels(x: tf.Tensor) -> tf.Tensor:
        if axes == [*range(inputs.shape.rank - 1)]:  # broadcasting aligns the last axis by itself
            return x
        return tf.reshape(x, [1 if i in axes else -1 for i in range(inputs.shape.rank)])

    @tf.custom_gradient
    def of_all(x: tf.Tensor) -> Any:
        total, count = _total_and_count(x, mask, axes)
        mean = tf.math.divide_no_nan(total, count)
        squares = _where(mask, tf.math.squared_difference(x, along_channels(mean)))
        variance = tf.math.divide_no_nan(sum_without_gradient(tf.reduce_sum(squares, axes)), count)

        def gradient(of_mean: tf.Tensor, of_variance: tf.Tensor) -> tf.Tensor:
            # Deviations from the mean add up to 0, so the variance has no gradient by the mean.
            both = _sum_of_gradients(tf.concat([of_mean, of_variance], 0))
            each = [tf.math.divide_no_nan(x, count) for x in tf.split(both, 2)]
            # Second derivatives need the mean that ``of_all`` returns, since it has this gradient.
            deviation = inputs - along_channels(found[0])
            slope = along_channels(2 * each[1])
            return _where(mask, along_channels(each[0]) + slope * deviation)

        return (mean, variance), gradient

    found: tuple[tf.Tensor, tf.Tensor] = of_all(inputs)
    if current.alone is False:
        current.agreed.update(x.ref() for x in found if not tf.executing_eagerly())
    return found


def _total_and_count(x: tf.Tensor, mask: tf.Tensor | None, axes: list[int]) -> list[tf.Tensor]:
    """Return, for each channel, the sum of all replicas' numbers, and how many there are."""
    total = tf.reduce_sum(_where(mask, x), axes)
    if mask is None:
        channels = total.shape.num_elements()
        count = tf.cast(tf.reshape(tf.size(x) // channels, [1]), x.dtype)
        total, count = tf.split(sum_without_gradient(tf.concat([total, count], 0)), [channels, 1])
        return [total, count]
    count = tf.reduce_sum(tf.cast(mask, x.dtype), axes)
    total, count = tf.split(sum_without_gradient(tf.concat([total, count], 0)), 2)
    return [total, count + keras.backend.epsilon()]  # as Keras does


def _sum_of_gradients(gradients: tf.Tensor) -> tf.Tensor:
    """Sum gradients over replicas, weighted by ``own_losses.summed_backwards`` if necessary.

    Second derivatives belong to a number that all replicas add up to. If the first derivatives are
    scaled already, the second ones must not be weighted again.
    """
    own = current.own and not is_scaled(gradients)

    @tf.custom_gradient
    def summed(x: tf.Tensor) -> Any:
        def gradient(of_sum: tf.Tensor) -> tf.Tensor:
            with during(own=own):
                return tf.distribute.get_replica_context().all_reduce("SUM", of_sum)

        return sum_without_gradient(x), gradient

    total: tf.Tensor = summed(gradients)
    return total


def _where(mask: tf.Tensor | None, values: tf.Tensor) -> tf.Tensor:
    return values if mask is None else tf.where(mask, values, 0)


def average(variables: list[Any], share: Share) -> None:
    """Replace variables by their means over replicas, weighted by shares.

    Means are computed in float64: if all replicas have the same value, the mean is bitwise equal to
    it. In steps that replicas make alone, each replica keeps its own values. A group that makes its
    steps together takes the means over the group.
    """
    distinct = list({id(v): v for v in variables}.values())
    if not distinct or (current.alone is True and current.group is None):
        return
    if isinstance(current.alone, bool):
        _averaged(distinct, share)
    else:
        tf.cond(current.alone, tf.no_op, lambda: _averaged_over_all(distinct, share))


def _averaged_over_all(distinct: list[Any], share: Share) -> tf.Operation:
    with during(alone=False):
        _averaged(distinct, share)
    return tf.no_op()


def _averaged(distinct: list[Any], share: Share) -> None:
    own = [own_copy(v) for v in distinct]
    parts = [
        tf.math.multiply_no_nan(tf.cast(v.read_value(), tf.float64), share.weight(tf.float64))
        for v in own
    ]
    means = tf.distribute.get_replica_context().all_reduce("SUM", parts)
    for variable, total in zip(own, means, strict=True):
        mean = tf.cast(total, variable.dtype)
        if current.group is not None:  # a group may hold no rows while other groups do
            mean = tf.where(current.rows.nobody, variable.read_value(), mean)
        variable.assign(mean)
