"""Scenes of a Keras user, once for any strategy: on replicas and on one device.

A scene is a function of a strategy that returns what its user sees, by name. TensorFlow's default
strategy is one device, so the same scene is its own reference.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfscale.bridge.objects import native


def played(scene, strategy):
    """Play a scene from a known start, and return the numbers that its user sees."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    return {name: np.asarray(value, np.float64) for name, value in scene(strategy).items()}


def check_same(expected, found, tolerance=1e-6):
    """All that was seen on one device was seen on replicas, and nothing else."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, tolerance, tolerance, err_msg=name)


def scenes(*functions: Any, **named: Any) -> dict[str, Any]:
    """Return the scenes by name; processes receive names with commas between them."""
    found = {function.__name__: function for function in functions} | named
    assert not any("," in name for name in found)
    return found


def batches(strategy, *arrays, size):
    """Return the batches of a dataset, each shared out over the replicas."""
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(size)
    return strategy.experimental_distribute_dataset(data)


def copies(strategy, variable):
    """A variable's value on each replica of this worker."""
    return [one.numpy() for one in strategy.experimental_local_results(native(variable))]


def of_all(strategy, variable):
    """Return a variable's value, which has the same bits on all replicas of this worker."""
    first, *others = copies(strategy, variable)
    for other in others:
        np.testing.assert_array_equal(other, first)
    return first


def weights_of(strategy, model, prefix="weight"):
    """All variables of a model, by number."""
    return {f"{prefix} {i}": of_all(strategy, v) for i, v in enumerate(model.weights)}


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rows(played, quick, by_workers=lambda name: True):
    """Layouts and names, for ``pytest.mark.parametrize``.

    Args:
        played: scenes by name.
        quick: scenes that ``make test`` plays too, in one process.
        by_workers: whether two processes play a scene, too.
    """
    in_process = [("1x2", name) for name in played]
    in_two = [("2x1", name) for name in played if by_workers(name)]
    return [
        pytest.param(*row, marks=[] if row[0] == "1x2" and row[1] in quick else pytest.mark.full)
        for row in in_process + in_two
    ]
