"""The time that a model's passes take on this machine: what a plan for such machines needs."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from tfscale.plan.cluster import Host
from tfscale.plan.read import Call, calls_of, can_be_staged, example_specs, units_of
from tfscale.plan.units import Unit
from tfscale.support import arguments

_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Measured:
    """A model as measured on one device of this machine.

    Counted operations say little of the time that a small or a memory-bound layer takes. So each
    layer's operations are those that the device makes, at its rate, in the layer's measured time.

    Args:
        units: the units of the model.
        rate: operations per second in the passes of a large batch.
        launch: seconds that a pass of a unit takes at least, on a batch of any size.
        update: seconds in which the optimizer updates a parameter; 0 without an optimizer.
        staged: whether the model can be cut into stages: it is Sequential or functional.
    """

    units: tuple[Unit, ...]
    rate: float
    launch: float
    update: float
    staged: bool = True

    def on(self, host: Host) -> Host:
        """Return a host whose devices are as fast as this one."""
        return dataclasses.replace(host, rate=self.rate, launch=self.launch, update=self.update)


def measured(model: Any, batch: int, example: Any = None) -> Measured:
    """Measure a model's layers, passes and optimizer on this machine's device.

    The reading of data is left out. Weights and the optimizer's state stay as they are.

    Args:
        model: a built Keras model.
        batch: samples of a pass, as many as one device will have.
        example: a batch of the model's inputs, if the model does not know its shapes.

    Example:
        >>> found = tfscale.plan.measured(model, batch=64)
        >>> found.rate > 1e6, len(found.units) > 0
        (True, True)
    """
    arguments.whole(batch, "batch", 1, what="a number of samples")
    calls = calls_of(model, example)
    counted = units_of(model, calls)
    flops = sum(unit.all_flops for unit in counted)
    launch, per_sample = _passes(model, batch, example, 2 * len(counted))
    times: dict[str, tuple[float, float]] = {}
    for call in calls:
        if call.key not in times:
            times[call.key] = _seconds_of_layer(call, batch)
    # Alone, layers pay for calls that the whole model pays for once.
    share = flops / sum(sum(times[call.key]) for call in calls)
    units = tuple(
        dataclasses.replace(unit, flops=share * forward, backward_flops=share * backward)
        for unit, (forward, backward) in zip(counted, (times[call.key] for call in calls))
    )
    update = 0.0 if getattr(model, "optimizer", None) is None else _seconds_of_update(model)
    return Measured(units, flops / per_sample, launch, update, can_be_staged(model))


def _passes(model: Any, batch: int, example: Any, launches: int) -> tuple[float, float]:
    """Return the seconds of a launch, and of both passes of a sample: a line through two sizes."""
    small = max(1, batch // 8)
    large = max(batch, 2 * small)
    times = [_seconds_of_model(model, samples, example) for samples in (small, large)]
    slope = max(times[1] - times[0], 0.05 * times[1]) / (large - small)
    return max(0.0, times[1] - slope * large) / launches, slope


def _seconds_of_update(model: Any) -> float:
    """Return the seconds in which a compiled model's optimizer updates one parameter."""
    import keras
    import tensorflow as tf

    optimizer, weights = model.optimizer, list(model.trainable_weights)
    optimizer.build(weights)
    state = [*weights, *optimizer.variables]
    before = [keras.ops.convert_to_numpy(one) for one in state]
    gradients = [tf.zeros(weight.shape, weight.dtype) for weight in weights]

    def update() -> Any:
        optimizer.apply(gradients)
        return tf.constant(0.0)

    seconds = _median_seconds(update)
    for variable, value in zip(state, before, strict=True):
        variable.assign(value)
    return seconds / float(sum(math.prod(weight.shape) for weight in weights))


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
