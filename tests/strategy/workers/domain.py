"""A worker that computes slices of images with another one.

It prints the numbers of one training as JSON. If there is a VICTIM, that worker is killed before
its third step: the other one prints ERROR with what it was told.
"""

import json
import os

import keras
import numpy as np

import tfscale
from tests.strategy import images
from tests.strategy.doubles import use_doubles
from tests.strategy.workers import last
from tfscale.tools.bench.measure import leave

ME = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
VICTIM = int(os.environ.get("VICTIM", -1))


def make_strategy():
    deadline = float(os.environ.get("DEADLINE", 100))
    grid = tfscale.Grid(tensor=2)
    return tfscale.ScaleStrategy("ring", grid=grid, tensor={"conv": "height"}, deadline=deadline)


def train():
    use_doubles()
    build = getattr(images, os.environ["BUILD"])
    model = images.made(make_strategy(), build, os.environ["OPTIMIZER"])
    found = images.trained(model)
    model.save(os.environ["FILE"])
    print("\nTRAINED", json.dumps([np.asarray(x).tolist() for x in found]), flush=True)
    leave(os.environ["MEETING"], "worker", ME, 2)


def fail():
    model = images.made(make_strategy(), images.short)
    x, y = images.data(model, 320)
    model.fit(x, y, 16, 100, verbose=0, callbacks=[last.Kill()] if ME == VICTIM else [])


if __name__ == "__main__":
    keras.config.disable_traceback_filtering()
    with last.words():
        train() if VICTIM < 0 else fail()
