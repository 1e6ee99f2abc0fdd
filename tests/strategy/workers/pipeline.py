"""A worker of a pipeline over processes: it prints the numbers of one training as JSON."""

import json
import os

import keras
import numpy as np
import tensorflow as tf

DEVICES = int(os.environ["LAYOUT"].split("x")[1])
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)

import tfscale  # noqa: E402
from tests.strategy import pipelines  # noqa: E402
from tfscale.tools.bench.measure import leave  # noqa: E402

ME = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
WORKERS = int(os.environ["LAYOUT"].split("x")[0])


def main():
    strategy = tfscale.ScaleStrategy(
        "ring",
        grid=tfscale.Grid(stages=2),
        pipeline=tfscale.Pipeline(microbatches=4, order=os.environ["ORDER"]),
        deadline=100,
    )
    build = getattr(pipelines, os.environ["BUILD"])
    model, found = pipelines.trained(strategy, build, pipelines.OPTIMIZERS[os.environ["OPTIMIZER"]])
    model.save(os.environ["FILE"])
    numbers = {name: np.asarray(value, np.float64).tolist() for name, value in found.items()}
    print("\nTRAINED", json.dumps(numbers), flush=True)
    leave(os.environ["MEETING"], "worker", ME, WORKERS)


if __name__ == "__main__":
    keras.config.disable_traceback_filtering()
    main()
