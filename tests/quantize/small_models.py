"""Small models, each with other layers, and data for them."""

import keras
import numpy as np
from keras import layers

from tfscale import quantize

CLASSES = 4


def images(rows=96, size=12, seed=0):
    dice = np.random.default_rng(seed)
    y = dice.integers(0, CLASSES, rows)
    x = dice.standard_normal((rows, size, size, 3)) + 0.3 * y[:, None, None, None]
    return x.astype("float32"), y


def residual():
    """Convolutions with batch norm, a depthwise one, a residual sum, and means."""
    first = keras.Input([12, 12, 3])
    x = layers.Conv2D(8, 3, padding="same", use_bias=False, name="stem")(first)
    x = layers.BatchNormalization()(x)
    x = layers.ReLU(6)(x)
    y = layers.DepthwiseConv2D(3, padding="same", name="depthwise")(x)
    y = layers.BatchNormalization()(y)
    y = layers.Conv2D(8, 1, name="pointwise")(y)
    x = layers.ReLU()(layers.Add(name="add")([x, y]))
    x = layers.AveragePooling2D(3, 2, padding="same")(x)
    x = layers.SeparableConv2D(6, 3, padding="same", activation="relu", name="separable")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(first, layers.Dense(CLASSES, name="head")(x))


def downsampling():
    """Two residual blocks, the second of which halves the image; sums of other sums."""
    first = keras.Input([12, 12, 3])
    x = layers.ZeroPadding2D(1)(first)
    x = layers.Conv2D(6, 3, activation="relu", name="stem")(x)
    for block, (filters, stride) in enumerate([(6, 1), (12, 2)]):
        y = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False, name=f"a{block}")(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        y = layers.Conv2D(filters, 3, padding="same", name=f"b{block}")(y)
        y = layers.BatchNormalization()(y)
        if stride > 1:
            x = layers.Conv2D(filters, 1, stride, padding="same", name=f"down{block}")(x)
        x = layers.Activation("relu")(layers.Add()([x, y]))
    x = layers.Dropout(0.1)(layers.MaxPooling2D(2)(x))
    x = layers.Dense(16, "relu", name="hidden")(layers.Flatten()(x))
    return keras.Model(first, layers.Dense(CLASSES, name="head")(x))


def branches():
    """Grouped and dilated convolutions whose outputs are joined; a pool of maxima."""
    first = keras.Input([12, 12, 3])
    x = layers.Conv2D(8, 5, 2, padding="same", activation="relu", name="stem")(first)
    a = layers.Conv2D(4, 3, padding="same", groups=2, activation="relu6", name="grouped")(x)
    b = layers.Conv2D(4, 3, padding="same", dilation_rate=2, activation="relu", name="dilated")(x)
    x = layers.Concatenate()([a, b, layers.MaxPooling2D(3, 1, padding="same")(x)])
    x = layers.DepthwiseConv2D(3, depth_multiplier=2, activation="relu", name="depthwise")(x)
    x = layers.GlobalMaxPooling2D()(x)
    return keras.Model(first, layers.Dense(CLASSES, "softmax", name="head")(x))


def plain():
    """A Sequential model of dense layers."""
    return keras.Sequential(
        [
            keras.Input([12, 12, 3]),
            layers.Flatten(),
            layers.Dense(32, use_bias=False, name="first"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dense(32, "relu", name="second"),
            layers.Dense(CLASSES, name="head"),
        ]
    )


def sequence():
    """A Sequential model of one-dimensional convolutions over the rows of an image."""
    return keras.Sequential(
        [
            keras.Input([12, 12, 3]),
            layers.Reshape([12, 36]),
            layers.Conv1D(8, 3, padding="causal", activation="relu", name="causal"),
            layers.AveragePooling1D(2),
            layers.SeparableConv1D(8, 3, activation="relu", name="separable"),
            layers.EinsumDense("abc,cd->abd", [4, 6], bias_axes="d", name="einsum"),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(CLASSES, name="head"),
        ]
    )


def transformer():
    first = keras.Input([6], dtype="int32")
    x = layers.Embedding(20, 8, name="words")(first)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4, dropout=0.2, name="mha")(x, x)])
    return keras.Model(first, layers.Dense(CLASSES, name="head")(layers.Flatten()(x)))


def words(rows=96):
    dice = np.random.default_rng(0)
    x = dice.integers(0, 20, (rows, 6)).astype("int32")
    return x, x[:, 0] % CLASSES


NETS = {each.__name__: each for each in (residual, downsampling, branches, plain, sequence)}


def kernels(model, bits):
    """Return a plan that gives all layers with kernels the same bits."""
    norm = layers.BatchNormalization
    return {each.path: bits for each in model.layers if each.weights and not isinstance(each, norm)}


def settled(build):
    """Return a model as if it had been trained: no weight is 0, no batch norm is new."""
    keras.utils.set_random_seed(1)
    model, dice = build(), np.random.default_rng(1)
    for weight in model.weights:
        if len(weight.shape) == 1:
            weight.assign(weight + dice.uniform(-0.2, 0.2, weight.shape))
    return model


def compiled(model, optimizer="adam"):
    """Return a model that trains without XLA, whose compilation would take most of the time."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    return model


def tuned(name, ranges):
    """Return all weights of a net after some steps with few bits, and whether its program of
    integers gives its answers.
    """
    x, y = images(40)
    keras.utils.set_random_seed(1)
    model = globals()[name]()
    small = quantize.apply(model, kernels(model, 4), x, ranges=ranges)
    compiled(small, keras.optimizers.SGD(0.05, momentum=0.9))
    small.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    equal = np.array_equal(quantize.integers(small).run(x), small.predict(x, verbose=0))
    return np.concatenate([np.ravel(np.asarray(v)) for v in small.get_weights()]), equal
