"""A worker that shares experts with another one: it prints the numbers of one training as JSON."""

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
from tfscale.tools.bench.measure import leave  # noqa: E402

ME = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
WORKERS = int(os.environ["LAYOUT"].split("x")[0])


def make_strategy():
    return tfscale.ScaleStrategy("ring", grid=tfscale.Grid(experts=2), deadline=100)


def train():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    build = getattr(experts, os.environ["BUILD"])
    model = experts.made(make_strategy(), build, os.environ["OPTIMIZER"])
    found = experts.trained(model)
    model.save(os.environ["FILE"])
    print("\nTRAINED", json.dumps([np.asarray(x).tolist() for x in found]), flush=True)
    leave(os.environ["MEETING"], "worker", ME, WORKERS)


if __name__ == "__main__":
    keras.config.disable_traceback_filtering()
    train()
