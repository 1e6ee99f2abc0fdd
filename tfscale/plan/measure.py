"""The rate that this machine reaches with a model: what a plan for such machines needs to know."""

from __future__ import annotations

import statistics
import time
from typing import Any

from tfscale.plan.read import example_specs, read
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
    import tensorflow as tf

    arguments.whole(batch, "batch", 1, what="a number of samples")
    flops = batch * sum(unit.all_flops for unit in read(model, example))
    inputs = tf.nest.map_structure(
        lambda spec: tf.zeros([batch, *spec.shape[1:]], spec.dtype), example_specs(model, example)
    )
    weights = [weight.value for weight in model.trainable_weights]

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(inputs, training=True))
            total = tf.add_n([tf.reduce_sum(tf.cast(one, tf.float32)) for one in outputs])
        gradients = [one for one in tape.gradient(total, weights) if one is not None]
        return tf.add_n([tf.reduce_sum(tf.convert_to_tensor(one)) for one in gradients])

    step().numpy()
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        step().numpy()
        seconds.append(time.perf_counter() - start)
    return flops / statistics.median(seconds)
