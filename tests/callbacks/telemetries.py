"""Small trainings for the tests of telemetry, and what it wrote of them."""

from __future__ import annotations

import json

import keras
import numpy as np

WIDTH, BATCH, STEPS = 64, 16, 5


def numbers(steps=STEPS):
    x = np.random.default_rng(steps).standard_normal((steps * BATCH, WIDTH)).astype(np.float32)
    return x, x[:, :1]


def compiled(optimizer=None, **how):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input([WIDTH]), *layers, keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.001), "mse", **how)
    return model


def fit(model, callbacks=(), **how):
    how = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **how}
    return model.fit(*numbers(), callbacks=list(callbacks), **how)


def lines(path, kind=None):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in found if kind in (None, line["kind"])]


def added(found, what):
    return sum(line[what] for line in found)
