"""Small nets with losses of many kinds, and their data."""

from __future__ import annotations

import functools

import keras
import numpy as np
from keras import layers

cross_entropy = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)


def numbers(rows=49):
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 4)), rng.integers(0, 3, rows), rng.uniform(0, 2, rows)


def weighted():
    hidden = layers.Dense(5, "tanh", kernel_regularizer="l2")
    model = keras.Sequential([layers.Input([4]), hidden, layers.Dense(3)])
    model.compile(loss=cross_entropy())
    return model, numbers()


def small():
    """Build a net of 139 numbers."""
    hidden = [layers.Dense(8, "tanh"), layers.Dense(8, "tanh")]
    model = keras.Sequential([layers.Input([4]), *hidden, layers.Dense(3)])
    model.compile(loss=cross_entropy())
    return model, numbers()[:2]


def by_weights():
    """A mean that divides by the sum of weights, which differs from batch to batch."""
    model, data = weighted()
    model.compile(loss=cross_entropy(reduction="mean_with_sample_weight"))
    return model, data


def normalized():
    hidden = [layers.Dense(5), layers.BatchNormalization(), layers.Activation("gelu")]
    model = keras.Sequential([layers.Input([4]), *hidden, layers.Dense(3)])
    model.compile(loss=cross_entropy(ignore_class=1))
    return model, numbers()


def masked():
    """Sentences whose lengths differ from batch to batch."""
    inputs = layers.Input([6], dtype="int32")
    hidden = layers.LSTM(3, return_sequences=True)(layers.Embedding(9, 3, mask_zero=True)(inputs))
    model = keras.Model(inputs, layers.Dense(4)(hidden))
    model.compile(loss=cross_entropy())
    rng = np.random.default_rng(0)
    x = rng.integers(1, 9, (17, 6))
    x[np.arange(6) >= np.sort(1 + np.arange(17) % 6)[:, None]] = 0
    return model, (x, x % 4)


def two_outputs():
    inputs = layers.Input([4])
    hidden = layers.Dense(4, "tanh", activity_regularizer="l2")(inputs)
    outputs = {"a": layers.Dense(2, name="a")(hidden), "b": layers.Dense(1, name="b")(hidden)}
    model = keras.Model(inputs, outputs)
    losses = {"a": "mse", "b": keras.losses.MeanSquaredError(reduction="sum")}
    model.compile(loss=losses, loss_weights={"a": 2.0, "b": 0.3})
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 4))
    return model, (x, {"a": rng.standard_normal((16, 2)), "b": rng.standard_normal((16, 1))})


def attention():
    inputs = layers.Input([5, 6])
    hidden = layers.LayerNormalization()(inputs)
    hidden = layers.LayerNormalization()(inputs + layers.MultiHeadAttention(2, 3)(hidden, hidden))
    model = keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))
    model.compile(loss="mse")
    rng = np.random.default_rng(0)
    return model, (rng.standard_normal((10, 5, 6)), rng.standard_normal((10, 2)))


class OwnLoss(keras.Model):
    """Computes its loss by itself."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, "tanh")

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y_pred) * keras.ops.cast(x[:, :3], y_pred.dtype))


def own_loss():
    model = OwnLoss()
    model.compile()
    return model, numbers()[:2]
