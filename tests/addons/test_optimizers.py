"""Our optimizers under Keras 2, and LAMB against that of tensorflow-addons."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_addons as tfa

from tests.addons.models import OPTIMIZERS, furthest, scale, train
from tfscale.optimizers import LAMB, LARS, AdaHessian

SHAPES = {"kernel": (7, 5), "bias": (5,), "gamma": (5,)}
OURS = {
    "our lamb": lambda: LAMB(0.01, weight_decay=0.01),
    "our lars": lambda: LARS(0.5, trust_coefficient=0.02, weight_decay=0.01),
    "our adahessian": lambda: AdaHessian(0.05, epsilon=0.1, weight_decay=0.01),
}


@pytest.fixture(autouse=True)
def known(monkeypatch):
    for name, make in OURS.items():
        monkeypatch.setitem(OPTIMIZERS, name, make)


def variables():
    rng = np.random.default_rng(0)
    return [tf.Variable(rng.standard_normal(s), dtype="float32", name=n) for n, s in SHAPES.items()]


def steps(optimizer, count=100):
    mine, rng = variables(), np.random.default_rng(1)
    for _ in range(count):
        given = [tf.constant(rng.standard_normal(s), tf.float32) for s in SHAPES.values()]
        optimizer.apply_gradients(zip(given, mine, strict=True))
    return [v.numpy() for v in mine]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_is_that_of_tensorflow_addons(decay, fused):
    """Give LAMB both of its lists: if only the first is given, it serves as the second, too."""
    lists = {"exclude_from_weight_decay": ["bias", "gamma"]}
    ours = LAMB(0.01, weight_decay=decay, exclude_from_adaptation=["bias"], fused=fused, **lists)
    found = steps(ours)
    lists["exclude_from_layer_adaptation"] = ["bias"]
    theirs = steps(tfa.optimizers.LAMB(0.01, weight_decay=decay, **lists))
    for a, b in zip(found, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", OURS)
def test_two_replicas_are_one_device(optimizer):
    """Allow for rounding as large as that of one device that adds in another order."""
    weights, _ = train(optimizer)
    found, _ = train(optimizer, scale(2))
    other_order, _ = train(optimizer, backwards=True)
    assert furthest(weights, found) <= 10 * max(furthest(weights, other_order), 1e-7)


@pytest.mark.parametrize("optimizer", OURS)
def test_all_arguments_are_saved(optimizer, tmp_path):
    layers = tf.keras.layers
    model = tf.keras.Sequential([tf.keras.Input((4,)), layers.Dense(3)])
    model.compile(OURS[optimizer](), "mse")
    x = np.random.default_rng(0).standard_normal((16, 4), np.float32)
    model.fit(x, x[:, :3], verbose=0)
    model.save(tmp_path / "model.keras")
    again = tf.keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.get_config() == model.optimizer.get_config()
    for one in (model, again):
        one.fit(x, x[:, :3], verbose=0, shuffle=False)
    assert furthest(model.get_weights(), again.get_weights()) <= 1e-6


def test_a_rate_may_be_a_schedule_and_gradients_sparse():
    schedule = tf.keras.optimizers.schedules.PolynomialDecay(0.1, 10)
    optimizer, rows = LAMB(schedule), tf.Variable(tf.ones([4, 2]))
    slices = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 1]), tf.constant([4, 2]))
    optimizer.apply_gradients([(slices, rows)])
    moved = rows.numpy()
    assert np.all(moved[1] < 1) and np.all(moved[[0, 2, 3]] == 1)
