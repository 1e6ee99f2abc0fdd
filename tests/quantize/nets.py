"""A small net with layers of many kinds, and its data."""

import keras
import numpy as np
from keras import layers

from tfscale import quantize


def data(rows=40):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, 8, 8, 3)).astype("float32")
    return x, (x[:, :4].mean((1, 2, 3)) > 0).astype("int32")


def mixed(seed=0):
    """Return a compiled net: convolutions of all kinds, attention, two sums, an unknown layer."""
    keras.utils.set_random_seed(seed)
    inputs = layers.Input([8, 8, 3])
    x = layers.Conv2D(4, 3, padding="same", activation="relu", name="stem")(inputs)
    branch = layers.Conv2D(4, 3, padding="same", name="branch")(x)
    branch = layers.ReLU()(layers.BatchNormalization(name="norm")(branch))
    x = layers.Add()([branch, layers.Conv2D(4, 1, name="down")(x)])
    x = x + layers.SeparableConv2D(4, 3, padding="same", name="separable")(x)
    x = layers.DepthwiseConv2D(3, strides=2, name="depthwise")(x)
    x = layers.Conv2DTranspose(6, 2, strides=2, name="transposed")(x)
    x = layers.Reshape((36, 6))(x)
    x = layers.MultiHeadAttention(2, 3, name="attention")(x, x)
    x = layers.GRU(4, name="recurrent")(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def dense(seed=0, trained=True):
    """Return a compiled net of three dense layers, and its data."""
    keras.utils.set_random_seed(seed)
    hidden = [layers.Dense(6, "tanh", name=name) for name in ("first", "second")]
    model = keras.Sequential([layers.Input([5]), *hidden, layers.Dense(2, name="last")], name="net")
    model.compile(
        keras.optimizers.Adam(0.03), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    x = np.random.default_rng(0).standard_normal((48, 5)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    if trained:
        model.fit(x, y, batch_size=48, epochs=30, verbose=0)
    return model, x, y


def study(bits=(2, 4, 8), **options):
    """Return a study of the dense net, which takes a second."""
    model, x, y = dense()
    options = {"samples": 8, "batch_size": 48, **options}
    return quantize.sensitivity(model, x, y, bits=bits, **options)
