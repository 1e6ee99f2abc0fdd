"""Trainings on one device and on two replicas of this process, side by side."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tfscale import ScaleStrategy

DEVICES = ["CPU:0", "CPU:1"]


def two(**arguments):
    return ScaleStrategy("ring", devices=DEVICES, **arguments)


def outcome(strategy, build, train):
    """Return the result of a training, and the weights that it leaves."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
    seen = {name: np.asarray(value) for name, value in train(model).items()}
    return seen, [np.asarray(w) for w in model.get_weights()]


def check_twins(build, train, tolerance=1e-6, **arguments):
    """Both trainings agree; what two replicas had seen is returned."""
    seen, weights = outcome(tf.distribute.get_strategy(), build, train)
    found, others = outcome(two(**arguments), build, train)
    assert found.keys() == seen.keys()
    for name, value in seen.items():
        np.testing.assert_allclose(found[name], value, tolerance, tolerance, err_msg=name)
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(other, one, 0, tolerance)
    return found
