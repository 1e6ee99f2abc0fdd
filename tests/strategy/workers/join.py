"""A worker that differs from the others in one way after the other, if it is worker 1.

Prints REFUSED with the case, how long it took and what was said; ACCEPTED otherwise. All
leave together, through a folder called MEETING.
"""

import json
import os
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale.strategy.workers import join
from tfscale.tools.bench.measure import leave

ME = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
(CPU,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(CPU, [tf.config.LogicalDeviceConfiguration()] * 2)


def start(**settings):
    return tfscale.ScaleStrategy(
        **{"algorithm": "ring", "devices": ["CPU:0"], "deadline": 120, **settings}
    )


def start_as(**odd):
    """Worker 1 starts with other settings."""
    return lambda: start(**odd if ME else {})


def start_of_another_version():
    if ME:
        join.__version__ = "0.0.1"
    start()


def train_with(
    width=8, activation="relu", momentum=0.0, layers=1, others=0, rows=16, validation=0, **length
):
    x = np.ones([rows, 4], np.float32)
    if validation:
        length["validation_data"] = (x[:1].repeat(validation, 0), x[:1, :1].repeat(validation, 0))
    keras.utils.clear_session()  # names are counted anew
    for _ in range(others):
        keras.layers.Dense(1)
    with STRATEGY.scope():
        dense = [keras.layers.Dense(width, activation) for _ in range(layers)]
        model = keras.Sequential([keras.Input([4]), *dense, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum), "mse")
    model.fit(x, x[:, :1], verbose=0, **{"batch_size": 8, **length})


def train_with_generator():
    """Train on data of unknown length: ``fit`` alone reads it, until it ends."""

    def batches():
        for _ in range(2):
            READ.append(1)
            yield np.ones([8, 4], np.float32), np.ones([8, 1], np.float32)

    with STRATEGY.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(batches(), steps_per_epoch=2, verbose=0)
    assert len(READ) == 2


READ = []


def train_as(**odd):
    """Worker 1 trains another model."""
    return lambda: train_with(**odd if ME else {})


CASES = {
    "version": start_of_another_version,
    "devices": start_as(devices=["CPU:0", "CPU:1"]),
    "wire": start_as(wire="int8"),
    "activation": train_as(activation="tanh"),
    "momentum": train_as(momentum=0.9),
    "width": train_as(width=9),
    "more layers": train_as(layers=2),
    "names": train_as(others=1),
    "rows": train_as(rows=33),
    "batch": train_as(batch_size=4),
    "epochs": train_as(epochs=2),
    "steps": train_as(steps_per_epoch=1),
    "validation": train_as(validation=8),
    "longer validation": lambda: train_with(validation=24 if ME else 8),
    "rows of one step": lambda: train_with(rows=15 if ME else 16),
    "generator": lambda: train_with_generator(),
    "nothing": train_as(),
}


def main():
    global STRATEGY  # one in a process
    if os.environ["CASES"].startswith("activation"):
        STRATEGY = start()
    for name in os.environ["CASES"].split(","):
        began = time.monotonic()
        try:
            CASES[name]()
        except (ValueError, tf.errors.OpError) as error:
            words = " ".join(str(error).split())
            print(f"\nREFUSED {name}: {time.monotonic() - began:.1f} {words}", flush=True)
        else:
            print(f"\nACCEPTED {name}", flush=True)


if __name__ == "__main__":
    main()
    leave(os.environ["MEETING"], "worker", ME, 2)
