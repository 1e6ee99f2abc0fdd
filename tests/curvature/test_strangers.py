"""Matrices of models and of data of kinds that few programs have."""

import keras
import numpy as np
import pytest
from keras import ops

from tfscale import curvature

RNG = np.random.default_rng(0)
X = RNG.standard_normal((32, 4)).astype("float32")
Y = RNG.standard_normal((32, 1)).astype("float32")


def model_of(loss, regularizer=None):
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(3, "tanh", kernel_regularizer=regularizer, name="hidden")
    model = keras.Sequential([keras.Input([4]), hidden, keras.layers.Dense(1, name="out")])
    model.compile(loss=loss)
    return model


def errors_of_rows(y_true, y_pred):
    return keras.losses.MeanSquaredError(reduction=None)(y_true, y_pred)


def mean_of_the_errors_of_rows(y_true, y_pred):
    return ops.mean(errors_of_rows(y_true, y_pred))


@pytest.mark.parametrize("loss", [errors_of_rows, mean_of_the_errors_of_rows])
def test_a_loss_that_computes_another_is_reduced_once(loss):
    expected = curvature.Hessian(model_of("mse"), X, Y)
    found = curvature.Hessian(model_of(loss), X, Y, batch_size=8)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    v = np.arange(found.size)
    np.testing.assert_allclose(found @ v, expected @ v, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss", [mean_of_the_errors_of_rows, keras.losses.MeanSquaredError()])
def test_fishers_matrix_needs_losses_of_rows(loss):
    model = model_of(loss)
    fisher = curvature.Fisher(model, X, Y, batch_size=8)
    if loss is mean_of_the_errors_of_rows:
        with pytest.raises(ValueError, match="returns one number for all rows"):
            fisher @ np.ones(fisher.size)
    else:
        whole = curvature.Fisher(model, X, Y, batch_size=32)
        v = np.ones(fisher.size)
        np.testing.assert_allclose(fisher @ v, whole @ v, rtol=1e-4, atol=1e-5)


def test_a_block_leaves_out_a_regularized_layer():
    h = curvature.Hessian(model_of("mse", "l2"), X, Y)
    block = h.block("out/")
    whole = h @ np.eye(h.size)
    np.testing.assert_allclose(
        block @ np.eye(block.size), whole[-block.size :, -block.size :], rtol=0, atol=1e-5
    )
    assert len(h.layers()) == 2


def test_each_rule_must_match_a_variable():
    with pytest.raises(ValueError, match="'hiden/kernel' in variables"):
        curvature.Hessian(model_of("mse"), X, Y, variables=["hiden/kernel", "out/kernel"])


class Data(keras.utils.PyDataset):
    batches = 4
    fails = False

    @property
    def num_batches(self):
        return self.batches

    def __getitem__(self, i):
        if self.fails and i == 3:
            self.fails = False
            raise OSError("the network is down for a moment")
        return X[8 * i : 8 * i + 8], Y[8 * i : 8 * i + 8]


def test_data_without_an_end_are_refused():
    data = Data()
    data.batches = None
    with pytest.raises(ValueError, match="has no end: give steps"):
        curvature.Hessian(model_of("mse"), data)
    assert curvature.Hessian(model_of("mse"), data, steps=2).loss > 0


def test_data_are_read_again_after_an_error():
    data = Data()
    h = curvature.Hessian(model_of("mse"), data)
    before = h.loss
    data.fails = True
    with pytest.raises(Exception, match="the network is down"):
        h.gradient  # noqa: B018
    assert h.loss == before
    assert np.isfinite(h.gradient).all()
