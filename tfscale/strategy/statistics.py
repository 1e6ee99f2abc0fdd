"""Statistics of layers: those of the global batch, or means of what replicas have assigned."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.protocols import Layer
from tfscale.strategy.current import current, during
from tfscale.strategy.share import Share


def moments(layer: Layer, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of the global batch, as batch normalization takes them of its own inputs.

    In two passes, since the mean of squares minus the square of the mean loses the more digits
    the larger the mean is beside the deviation. That takes two exchanges; Keras makes three.
    """
    context, axes = tf.distribute.get_replica_context(), layer._reduction_axes
    if mask is None:
        held, count = (
            inputs,
            tf.cast(tf.reduce_prod(tf.gather(tf.shape(inputs), axes)), inputs.dtype),
        )
    else:
        mask = tf.broadcast_to(mask[..., tf.newaxis], tf.shape(inputs))
        held, count = _where(mask, inputs), tf.reduce_sum(tf.cast(mask, inputs.dtype), axes)
    total, count = context.all_reduce("SUM", [tf.reduce_sum(held, axes), count])
    if mask is not None:
        count += keras.backend.epsilon()  # as Keras does
    mean = tf.math.divide_no_nan(total, count)
    channels = [-1 if i not in axes else 1 for i in range(inputs.shape.rank)]
    squares = _where(mask, tf.square(inputs - tf.reshape(mean, channels)))
    variance = context.all_reduce("SUM", tf.reduce_sum(squares, axes))
    return mean, tf.math.divide_no_nan(variance, count)


def _where(mask: tf.Tensor | None, values: tf.Tensor) -> tf.Tensor:
    return values if mask is None else tf.where(tf.cast(mask, tf.bool), values, 0)


def average(variables: list[Any], share: Share) -> None:
    """Means weighted by shares, in float64: if all agree, the mean is that value, to the bit.

    In steps that replicas make alone, each keeps its own; and a group that makes them together
    takes the means over the group.
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
    own = [v._get_on_device_or_primary() for v in distinct]
    parts = [
        tf.math.multiply_no_nan(tf.cast(v.read_value(), tf.float64), share.weight(tf.float64))
        for v in own
    ]
    means = tf.distribute.get_replica_context().all_reduce("SUM", parts)
    for variable, total in zip(own, means, strict=True):
        mean = tf.cast(total, variable.dtype)
        if current.group is not None:  # which may hold no rows, while others do
            mean = tf.where(current.rows.nobody, variable.read_value(), mean)
        variable.assign(mean)
