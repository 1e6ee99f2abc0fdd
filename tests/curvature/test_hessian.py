"""Products of a Hessian against the full one, by automatic differentiation."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.optimizers.common import hessian
from tfscale import curvature


def net():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input([4]), layers.Dense(5, "tanh"), layers.Dense(3)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def data(rows=50):
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 4), np.float32), rng.integers(0, 3, rows)


def test_products_are_those_of_the_hessian():
    model, (x, y) = net(), data()
    h = curvature.Hessian(model, x, y, batch_size=16)

    def gradient():
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x))
        return tape.gradient(loss, model.trainable_variables)

    full = hessian(gradient, [v.value for v in model.trainable_variables], 1e-2)
    np.testing.assert_allclose(h @ np.eye(h.size), full, 0, 1e-3)  # of differences in fp32


def test_a_model_that_is_not_compiled_is_refused():
    model = keras.Sequential([layers.Input([4]), layers.Dense(3)])
    with pytest.raises(ValueError, match="is not compiled"):
        curvature.Hessian(model, *data())
