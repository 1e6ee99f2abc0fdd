"""A worker that computes slices of images with another one.

It prints the numbers of one training as JSON. If there is a VICTIM, that worker is killed before
its third step: the other one prints ERROR with what it was told.
"""

import atexit
import json
import os
import signal
import time

import keras
import numpy as np

import tfscale
from tests.strategy import images
from tfscale.tools.bench.measure import leave

ME = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
VICTIM = int(os.environ.get("VICTIM", -1))


def make_strategy():
    deadline = float(os.environ.get("DEADLINE", 100))
    grid = tfscale.Grid(tensor=2)
    return tfscale.ScaleStrategy("ring", grid=grid, tensor={"conv": "height"}, deadline=deadline)


def train():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    build = getattr(images, os.environ["BUILD"])
    model = images.made(make_strategy(), build, os.environ["OPTIMIZER"])
    found = images.trained(model)
    model.save(os.environ["FILE"])
    print("\nTRAINED", json.dumps([np.asarray(x).tolist() for x in found]), flush=True)
    leave(os.environ["MEETING"], "worker", ME, 2)


class Kill(keras.callbacks.Callback):
    """End this worker before its third step."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def fail():
    model = images.made(make_strategy(), images.short)
    x, y = images.data(model, 320)
    model.fit(x, y, 16, 100, verbose=0, callbacks=[Kill()] if ME == VICTIM else [])


def main():
    try:
        train() if VICTIM < 0 else fail()
    except BaseException as error:
        words = " ".join(str(error).split())
        print(f"\nERROR {time.time()} {type(error).__name__} {words}", flush=True)
        atexit.register(time.sleep, 600)  # the test ends it
        raise


if __name__ == "__main__":
    keras.config.disable_traceback_filtering()
    main()
