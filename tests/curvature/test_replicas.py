"""Operators on replicas of one process, and of two: the numbers are those of one device."""

import functools
import json
import os
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import warm
from tests.curvature.replicas import CASES, measured
from tfscale import ScaleStrategy, curvature, sync

WORKER = Path(__file__).parent / "workers" / "measure.py"
ROOT = Path(__file__).parents[2]
SECONDS = 600  # on the busiest machine
DEVICES = ["CPU:0", "CPU:1"]

FULL = pytest.mark.full


def some_or_all(*cases):
    every = pytest.param(tuple(CASES), marks=FULL, id="all")
    return pytest.mark.parametrize("cases", [pytest.param(cases, id=", ".join(cases)), every])


@functools.cache
def expected(cases):
    return measured(tf.distribute.get_strategy(), cases)


def check(found, cases):
    assert found.keys() == expected(cases).keys()
    for name, numbers in expected(cases).items():
        size = np.abs(numbers).max()
        np.testing.assert_allclose(found[name], numbers, 0, 1e-5 * size, err_msg=name)


@pytest.mark.slow
@some_or_all("batch norm")
def test_two_replicas_of_a_process(cases):
    check(measured(ScaleStrategy("ring", devices=DEVICES, own_losses="mean"), cases), cases)


@pytest.mark.timeout(SECONDS + 60)
@some_or_all("weights")
def test_two_processes(cases):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with warm.Workers([str(WORKER), *cases], 2, environment={"PYTHONPATH": path}) as group:
        printed = group.wait(SECONDS)
    told = [re.findall(r"^TOLD (.*)$", output, re.MULTILINE) for output in printed]
    assert told[0] == told[1], "workers have other bits"
    check(json.loads(told[0][0]), cases)


def regression(strategy, **compiled):
    """A linear model, and data whose last batch of four has one row."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
        model.compile(**{"loss": "mse", **compiled})
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((9, 3)), rng.standard_normal((9, 2))
    return model, x.astype("float32"), y.astype("float32")


def of_keras(model, batch):
    return keras.losses.MeanSquaredError()(batch[1], model(batch[0]))


def of_tensorflow(model, batch):
    return tf.reduce_mean(tf.square(batch[1] - model(batch[0])))


def of_rows(model, batch):
    return tf.reduce_mean(tf.square(batch[1] - model(batch[0])), -1)


def of_rows_by_keras(model, batch):
    return keras.losses.MeanSquaredError(reduction=None)(batch[1], model(batch[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [of_keras, *(pytest.param(f, marks=FULL) for f in (of_tensorflow, of_rows, of_rows_by_keras))],
)
def test_a_function_is_weighted_once_whoever_reduces_in_it(function):
    model, x, y = regression(ScaleStrategy("ring", devices=DEVICES))
    h = curvature.Hessian(model, x, y, batch_size=4)
    own = curvature.Hessian(model, x, y, batch_size=4, loss=function)
    np.testing.assert_allclose(own @ np.ones(8), h @ np.ones(8), 1e-5)
    assert own.loss == pytest.approx(h.loss, rel=1e-5)


class OfANumber(keras.Model):
    """Model with a ``test_step`` of its own, and a variable that is one number."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=())
        self.scale.assign(2.0)

    def call(self, x):
        return self.scale * x

    def test_step(self, data):
        return super().test_step(data)


def test_a_product_that_is_one_number_is_no_log():
    with ScaleStrategy("ring", devices=DEVICES).scope():
        model = OfANumber()
        model.compile(loss="mse")
    x = np.array([[1.0], [2.0], [3.0]], "float32")
    h = curvature.Hessian(model, x, x, batch_size=2)
    np.testing.assert_allclose(h @ np.ones(1), [2 * 14 / 3], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("training", [pytest.param(False, marks=FULL), True])
def test_products_are_no_steps_of_rounds(training):
    strategy = ScaleStrategy("ring", devices=DEVICES, sync=sync.DiLoCo(2))
    model, x, y = regression(strategy, optimizer="sgd")
    model.fit(x, y, batch_size=4, verbose=0)
    before, rounds = model.get_weights(), strategy.rounds.figures()["rounds"]
    h = curvature.Hessian(model, x, y, batch_size=4, training=training)
    x = np.concatenate([x, np.ones([9, 1])], 1)
    exact = np.kron(x.T @ x / 9, np.eye(2))
    np.testing.assert_allclose(h @ np.ones(8), exact @ np.ones(8), 1e-5)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    assert strategy.rounds.figures()["rounds"] == rounds > 0
