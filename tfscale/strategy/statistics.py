"""Statistics of layers, computed from the global batch or averaged over replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.objects import innermost, native, reduced_axes
from tfscale.bridge.protocols import Layer, Optimizer
from tfscale.bridge.tensorflow import own_copy, replica_id, sum_without_gradient
from tfscale.exchange.team import Team
from tfscale.strategy.step import during, this_step


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
    step = this_step()
    if step.is_of_all:
        step.agreed.update(x.ref() for x in found if not tf.executing_eagerly())
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
    step = this_step()
    is_own = step.is_own and not step.is_scaled(gradients)

    @tf.custom_gradient
    def summed(x: tf.Tensor) -> Any:
        def gradient(of_sum: tf.Tensor) -> tf.Tensor:
            with during(dataclasses.replace(this_step(), is_own=is_own)):
                return tf.distribute.get_replica_context().all_reduce("SUM", of_sum)

        return sum_without_gradient(x), gradient

    total: tf.Tensor = summed(gradients)
    return total


def _where(mask: tf.Tensor | None, values: tf.Tensor) -> tf.Tensor:
    return values if mask is None else tf.where(mask, values, 0)


def average(variables: list[Any]) -> None:
    """Replace variables by their means over the team's replicas, weighted by shares of the rows.

    Means are computed in float64: if all replicas have the same value, the mean is bitwise equal to
    it. A replica that makes the step alone keeps its own values.
    """
    step, own = this_step(), [own_copy(v) for v in {id(v): v for v in variables}.values()]
    if not own or step.is_single:
        return
    weight = step.of_rows.weight(tf.float64)
    values = [v.read_value() for v in own]
    parts = [tf.math.multiply_no_nan(tf.cast(value, tf.float64), weight) for value in values]
    means = tf.distribute.get_replica_context().all_reduce("SUM", parts)
    for variable, value, mean in zip(own, values, means, strict=True):
        variable.assign(step.or_own(tf.cast(mean, variable.dtype), value))


def of_first_replica(everybody: Team, values: list[Any]) -> list[Any]:
    """Return the values of the team's first replica, which are random numbers; None stays None.

    The mean of the replicas' numbers would deviate less than those of one device.
    """

    def broadcast(team: Team, own: list[Any]) -> list[Any]:
        def each(replica: int, tensors: list[Any]) -> list[Any]:
            return [team.broadcast(replica, x, "random numbers") for x in tensors]

        return team.together(each, own)

    own = [tf.convert_to_tensor(x) for x in values if x is not None]
    found = iter(this_step().together(everybody, broadcast, own))
    return [None if x is None else next(found) for x in values]


def average_before_update(optimizer: Optimizer) -> None:
    """Average what a step has assigned to an optimizer, as a rate, before the optimizer reads it.

    The step may have computed it from the loss of this replica's rows.
    """
    step = this_step()
    if step.assigned is None:
        return
    own = {id(native(v)) for v in [*optimizer.variables, *innermost(optimizer).variables]}
    average([v for v in step.assigned.differ_by_replica if id(v) in own])


def before_and_all(extended: Any, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return counts of the rows that come before this replica's in the batch, and of all rows.

    One of the replicas that read the same rows counts.

    Args:
        extended: the strategy's ``extended``.
        counts: counts of this replica's rows, as a vector of whole numbers.
    """
    grid = extended.grid
    rank = extended.first_rank + replica_id()
    part, own = grid.part_of_batch(rank), counts if grid.slice(rank) == 0 else counts * 0
    parts = extended.number_of_replicas // grid.team
    every = this_step().sum_over_rows(tf.one_hot(part, parts, dtype=counts.dtype)[:, None] * own)
    return tf.reduce_sum(every[:part], 0), tf.reduce_sum(every, 0)
