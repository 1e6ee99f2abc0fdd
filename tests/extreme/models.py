"""A task whose classes are known, and models for it."""

from __future__ import annotations

import keras
import numpy as np

from tfscale.extreme import MACH

CLASSES, BUCKETS, REPETITIONS, WIDTH = 300, 16, 4, 12


def build(buckets):
    inputs = keras.Input([WIDTH])
    hidden = keras.layers.Dense(48, "relu")(inputs)
    return keras.Model(inputs, keras.layers.Dense(buckets)(hidden))


def samples(rows=600, classes=CLASSES, seed=0):
    """Points near one of as many random centres as there are classes."""
    centres = np.random.default_rng(1).standard_normal((classes, WIDTH))
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, rows)
    return (centres[y] + 0.05 * rng.standard_normal((rows, WIDTH))).astype("float32"), y


def mach(classes=CLASSES, build=build, compiled=True, **how):
    keras.utils.set_random_seed(1)
    how = {"buckets": BUCKETS, "repetitions": REPETITIONS, **how}
    made = MACH(build, classes, **how)
    if compiled:
        made.compile(keras.optimizers.Adam(0.02))
    return made


QUICK = {"epochs": 1, "batch_size": 100, "verbose": 0}
FULLY = {"epochs": 20, "batch_size": 50, "verbose": 0}
