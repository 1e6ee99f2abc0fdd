"""Estimators on a small net, against its whole Hessian by automatic differentiation."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.curvature import nets
from tests.curvature.matrices import Known, covered
from tfscale import curvature
from tfscale.analysis.curvature.results import student

RUNS = 100
ENOUGH = 90  # of 95% error bars; of numbers that are independent, one in 28 has fewer
SAMPLES = 30


def small():
    keras.utils.set_random_seed(0)
    return nets.small()


def whole_hessian(model, x, y):
    variables = model.trainable_variables
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = model.compute_loss(x, y, model(x))
        slopes = [tf.reshape(g, [-1]) for g in inner.gradient(loss, variables)]
        gradient = tf.concat(slopes, 0)
    rows = [tf.reshape(j, [len(gradient), -1]) for j in outer.jacobian(gradient, variables)]
    return tf.concat(rows, 1).numpy()


@functools.cache
def matrix():
    model, data = small()
    return whole_hessian(model, *data)


@pytest.fixture(params=["its matrix", pytest.param("itself", marks=pytest.mark.full)])
def net(in_double, request):
    """The net's matrix as an operator, as automatic differentiation or as products give it."""
    if request.param == "its matrix":
        return Known(matrix())
    model, data = small()
    return curvature.Hessian(model, *data, batch_size=49)


@pytest.mark.slow
def test_products_and_eigenvalues(in_double):
    """The last batch of 49 rows has one."""
    model, data = small()
    h = curvature.Hessian(model, *data, batch_size=16)
    size = np.abs(matrix()).max()
    np.testing.assert_allclose(h @ np.eye(h.size), matrix(), 0, 1e-6 * size)
    found, values = h.eigenvalues(top=10, bottom=5), np.linalg.eigvalsh(matrix())
    assert found.converged
    np.testing.assert_allclose(found.top, values[:-11:-1], 1e-4)
    np.testing.assert_allclose(found.bottom, values[:5], 1e-4)


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_traces(net, method):
    found = [net.trace(SAMPLES, method=method, seed=seed) for seed in range(RUNS)]
    assert covered([each.total for each in found], matrix().trace()) >= ENOUGH
    for layer in found[0].layers:
        places = np.concatenate(
            [np.arange(net.size)[part] for path, part in net.parts.items()
             if net.layer_of(path) == layer]
        )  # fmt: skip
        of_layer = [each.layers[layer] for each in found]
        assert covered(of_layer, np.diag(matrix())[places].sum()) >= ENOUGH, layer


def test_diagonals(net):
    """Judge the average over all 139 numbers: chance alone puts some of so many below 90."""
    found = [net.diagonal(SAMPLES, seed=seed) for seed in range(RUNS)]
    off = np.array([np.abs(each.values - np.diag(matrix())) for each in found])
    bars = student(0.95, SAMPLES - 1) * np.array([each.errors for each in found])
    within = np.sum(off <= bars + 1e-12, 0)
    assert within.mean() >= ENOUGH and within.min() >= 80


def test_norms(net):
    found = [net.frobenius(SAMPLES, seed=seed) for seed in range(RUNS)]
    assert covered(found, np.linalg.norm(matrix())) >= ENOUGH


@pytest.mark.timeout(1800)
def test_densities(net):
    """Few steps do not tell the many eigenvalues near zero apart; the errors must include that."""
    found = [net.density(probes=4, steps=12, seed=seed) for seed in range(RUNS)]
    values = np.linalg.eigvalsh(matrix())
    for number in (-0.05, -0.001, 0.001, 0.01, 0.1):
        shares = [each.share(above=number) for each in found]
        assert covered(shares, np.mean(values > number)) >= ENOUGH, number
    for point in (-0.1, 0.0, 0.2, 0.5):

        def near(x, point=point):
            return np.exp(-0.5 * ((x - point) / 0.1) ** 2)

        assert covered([each.mean_of(near) for each in found], near(values).mean()) >= ENOUGH, point
