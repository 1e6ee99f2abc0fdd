"""The time that a model's passes take on this machine: what a plan for such machines needs."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

from tfscale.plan.read import Call, calls_of, example_specs, read, unit_of_each
from tfscale.plan.units import Unit
from tfscale.support import arguments

_ROUNDS = 5


def rate_here(model: Any, batch: int, example: Any = None) -> float:
    """Return the operations per second of a forward and backward pass on this machine's device.

    The optimizer and the reading of data are left out. Weights do not change.

    Args:
        model: a built Keras model.
        batch: samples of a pass, as many as one device will have.
        example: a batch of the model's inputs, if the model does not know its shapes.

    Example:
        >>> tfscale.plan.rate_here(model, batch=64) > 1e6
        True
    """
    arguments.whole(batch, "batch", 1, what="a number of samples")
    flops = batch * sum(unit.all_flops for unit in read(model, example))
    return flops / _seconds_of_model(model, batch, example)


def read_here(model: Any, batch: int, example: Any = None) -> tuple[list[Unit], float]:
    """Return a model's units with the work that they are on this machine, and its rate.

    Counted operations say little of the time that a small or a memory-bound layer takes. So each
    layer's passes are timed alone, and its operations become those that the device makes in this
    time at the rate of the whole model: ``flops / rate`` is the measured time.

    Args:
        model: a built Keras model.
        batch: samples of a pass, as many as one device will have.
        example: a batch of the model's inputs, if the model does not know its shapes.

    Example:
        >>> units, rate = tfscale.plan.read_here(model, batch=64)
        >>> all(unit.flops > 0 for unit in units)
        True
    """
    rate = rate_here(model, batch, example)
    times: dict[str, tuple[float, float]] = {}
    calls = calls_of(model, example_specs(model, example))
    for call in calls:
        if call.key not in times:
            times[call.key] = _seconds_of_layer(call, batch)
    # Alone, layers pay for calls that the whole model pays for once.
    factor = sum(unit.all_flops for unit in read(model, example))
    factor /= rate * sum(sum(times[call.key]) for call in calls) / batch
    units = []
    for call, unit in zip(calls, unit_of_each(model, calls), strict=True):
        forward, backward = (factor * rate * one / batch for one in times[call.key])
        units.append(dataclasses.replace(unit, flops=forward, backward_flops=backward))
    return units, rate


def _seconds_of_model(model: Any, batch: int, example: Any) -> float:
    """Return the seconds of both passes of a model."""
    import tensorflow as tf

    inputs = tf.nest.map_structure(
        lambda spec: tf.zeros([batch, *spec.shape[1:]], spec.dtype), example_specs(model, example)
    )
    weights = [weight.value for weight in model.trainable_weights]

    def step() -> Any:
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(inputs, training=True))
            total = tf.add_n([tf.reduce_sum(tf.cast(one, tf.float32)) for one in outputs])
        gradients = [one for one in tape.gradient(total, weights) if one is not None]
        return tf.add_n([tf.reduce_sum(tf.convert_to_tensor(one)) for one in gradients])

    return _median_seconds(step)


def _seconds_of_layer(call: Call, batch: int) -> tuple[float, float]:
    """Return the seconds of a layer's forward and backward pass."""
    import tensorflow as tf

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, tf.TensorSpec):
            return leaf
        sizes = [size or 1 for size in leaf.shape]
        shape = [batch, *sizes[1:]] if sizes and leaf.shape[0] in (1, None) else sizes
        if not leaf.dtype.is_floating:
            return tf.zeros(shape, leaf.dtype)
        return tf.cast(tf.random.stateless_uniform(shape, [1, 2]), leaf.dtype)

    args, kwargs = tf.nest.map_structure(tensor, (call.args, call.kwargs))
    given = [x for x in tf.nest.flatten((args, kwargs)) if tf.is_tensor(x) and x.dtype.is_floating]
    weights = [weight.value for weight in call.layer.trainable_weights]

    def forward() -> Any:
        outputs = tf.nest.flatten(call.layer(*args, **kwargs))
        return [one for one in outputs if tf.is_tensor(one)]

    def both() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(given)
            outputs = [one for one in forward() if one.dtype.is_floating]
        return outputs, [one for one in tape.gradient(outputs, given + weights) if one is not None]

    alone, together = _median_seconds(forward), _median_seconds(both)
    return alone, max(together - alone, 0.0)


def _median_seconds(compute: Callable[[], Any]) -> float:
    """Return the median time of some runs of a function, traced and warm."""
    import tensorflow as tf

    run = tf.function(compute)

    def wait() -> None:
        for one in tf.nest.flatten(run(), expand_composites=True):
            one.numpy()

    wait()
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
