"""A worker that shares experts with another one.

It prints the numbers of one training as JSON. If there is a VICTIM, that worker is killed before
its third step: it prints EVENT, and the other one ERROR with what it was told.
"""

import json
import os

import keras
import numpy as np
import tensorflow as tf

DEVICES = int(os.environ["LAYOUT"].split("x")[1])
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)

import tfscale  # noqa: E402
from tests.strategy import experts  # noqa: E402
from tests.strategy.doubles import use_doubles  # noqa: E402
from tests.strategy.workers import last  # noqa: E402
from tfscale.tools.bench.measure import leave  # noqa: E402

ME = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
WORKERS = int(os.environ["LAYOUT"].split("x")[0])
VICTIM = int(os.environ.get("VICTIM", -1))


def make_strategy():
    deadline = float(os.environ.get("DEADLINE", 100))
    return tfscale.ScaleStrategy("ring", grid=tfscale.Grid(experts=2), deadline=deadline)


def train():
    use_doubles()
    build = getattr(experts, os.environ["BUILD"])
    model = experts.made(make_strategy(), build, os.environ["OPTIMIZER"])
    found = experts.trained(model)
    model.save(os.environ["FILE"])
    print("\nTRAINED", json.dumps([np.asarray(x).tolist() for x in found]), flush=True)
    leave(os.environ["MEETING"], "worker", ME, WORKERS)


def fail():
    with make_strategy().scope():
        layer = tfscale.parallel.Experts(4, 8, name="ffn")
        model = keras.Sequential([keras.Input([4]), layer])
        model.compile("sgd", "mse")
    x = np.ones((320, 4), "f4")
    model.fit(x, x, 16, 100, verbose=0, callbacks=[last.Kill()] if ME == VICTIM else [])


if __name__ == "__main__":
    keras.config.disable_traceback_filtering()
    with last.words():
        train() if VICTIM < 0 else fail()
