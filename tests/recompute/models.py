"""Small models of every kind of layer, and training them with and without recomputation."""

import contextlib
import functools
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tfscale.callbacks import Recompute
from tfscale.training.recompute.rewrite import rewrite

layers = keras.layers


def chain(*kinds, shape=(6, 8), depth=3):
    """A model that repeats layers, each time behind a Dense."""
    inputs = keras.Input(shape)
    x = inputs
    for _ in range(depth):
        x = layers.Dense(shape[-1], activation="gelu")(x)
        for kind in kinds:
            x = kind()(x)
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def images(*kinds, depth=3):
    inputs = keras.Input((8, 8, 4))
    x = inputs
    for _ in range(depth):
        x = layers.Conv2D(4, 3, padding="same", activation="silu")(x)
        for kind in kinds:
            x = kind()(x)
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))


def convolutions(residual, depth=3):
    """Each with a bias; between some of them, sums."""
    inputs = keras.Input((8, 8, 4))
    x = inputs
    for _ in range(depth):
        h = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
        h = layers.Conv2D(4, 3, padding="same")(h)
        x = keras.ops.relu(x + h) if residual else h
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))


def excited(depth=3):
    """Blocks whose channels are weighted, as in EfficientNet."""
    inputs = keras.Input((8, 8, 4))
    x = inputs
    for _ in range(depth):
        h = layers.BatchNormalization()(layers.Conv2D(8, 1, use_bias=False)(x))
        h = layers.Activation("silu")(h)
        h = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(h)
        h = layers.Activation("silu")(layers.BatchNormalization()(h))
        weights = layers.GlobalAveragePooling2D(keepdims=True)(h)
        weights = layers.Conv2D(2, 1, activation="silu")(weights)
        h = h * layers.Conv2D(8, 1, activation="sigmoid")(weights)
        x = x + layers.BatchNormalization()(layers.Conv2D(4, 1, use_bias=False)(h))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))


def swishes(depth=2):
    """A swish behind each batch norm. TensorFlow may compute it in one operation, and rounds."""
    inputs = keras.Input((8, 8, 4))
    x = inputs
    for _ in range(depth):
        x = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", use_bias=False)(x))
        x = layers.Activation("silu")(x)
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))


def perceptron():
    """Products of matrices, to which a bias is added, and activations that are fused with both."""
    inputs = keras.Input((12,))
    x = inputs
    for activation in ("relu", "gelu", "tanh", "elu", "relu"):
        x = layers.Dropout(0.3)(layers.Dense(16, activation=activation)(x))
    return keras.Model(inputs, layers.Dense(1)(x))


def residual(depth=3):
    inputs = keras.Input((6, 8))
    x = inputs
    for _ in range(depth):
        h = layers.BatchNormalization()(layers.Dense(8, activation="gelu")(x))
        x = keras.ops.relu(x + layers.Dropout(0.3)(h))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def branches(depth=2):
    """Three users of each tensor, and a skip over everything."""
    first = layers.Dense(8, activation="silu")
    inputs = keras.Input((6, 8))
    x = start = first(inputs)
    for _ in range(depth):
        a = layers.Dense(8, activation="gelu")(x)
        b = layers.Dropout(0.2)(layers.Dense(8, activation="tanh")(x))
        c = layers.LayerNormalization()(x)
        x = layers.Add()([layers.Multiply()([a, b]), c])
    x = layers.Concatenate()([x, start])
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def transformer(depth=2, **attention):
    inputs = keras.Input((6, 8))
    x = inputs
    for _ in range(depth):
        h = layers.LayerNormalization()(x)
        h = layers.MultiHeadAttention(2, 4, dropout=0.2)(h, h, **attention)
        x = x + h
        h = layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(8)(h))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def tokens(depth=2):
    """A transformer of words and their places."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8)(inputs) + layers.Embedding(6, 8)(keras.ops.arange(6))
    for _ in range(depth):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 4)(h, h, use_causal_mask=True)
        h = layers.LayerNormalization()(x)
        x = x + layers.Dense(8)(layers.Dense(16, activation="gelu")(h))
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(1)(x))


def mixer(depth=2):
    """Products over places and over channels in turn, each with a skip."""
    inputs = keras.Input((6, 8))
    x = inputs
    for _ in range(depth):
        h = layers.Permute((2, 1))(layers.LayerNormalization()(x))
        h = layers.Dense(6)(layers.Dense(12, activation="gelu")(h))
        x = x + layers.Permute((2, 1))(h)
        h = layers.Dense(12, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(8)(h)
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def approximate(depth=3):
    """An approximate gelu behind each norm: it takes powers, and so does its gradient."""
    inputs = keras.Input((12,))
    x = inputs
    for _ in range(depth):
        x = layers.LayerNormalization()(layers.Dense(16)(x))
        x = layers.Activation(lambda x: keras.activations.gelu(x, approximate=True))(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def shared(depth=3):
    """One layer, used again and again."""
    dense, norm = layers.Dense(8, activation="gelu"), layers.BatchNormalization()
    inputs = keras.Input((6, 8))
    x = inputs
    for _ in range(depth):
        x = norm(dense(x))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def nested():
    """A Sequential that holds models."""
    blocks = [
        keras.Sequential([keras.Input((6, 8)), layers.Dense(8, activation="gelu")]),
        residual(2),
    ]
    inside = keras.Model(blocks[1].inputs, blocks[1].layers[-3].output)
    return keras.Sequential(
        [
            *[keras.Input((6, 8)), blocks[0], inside, layers.Dense(8, "silu")],
            *[layers.Flatten(), layers.Dense(1)],
        ]
    )


def masked():
    """A mask that travels through segments."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(inputs)
    for _ in range(2):
        x = layers.LSTM(8, return_sequences=True, dropout=0.2, recurrent_dropout=0.2)(x)
        x = layers.Dropout(0.2)(x)
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


class Noise(layers.Layer):
    """Draws without a seed: it can't be drawn again."""

    def call(self, x):
        return x + 0.1 * tf.random.normal(tf.shape(x)) * x


class Picks(layers.Layer):
    """Takes as many numbers as are positive."""

    def call(self, x):
        return x * tf.reduce_mean(tf.gather_nd(x, tf.where(x > 0)))


class Called(layers.Layer):
    """Computes in a function, whose gradient takes what the function has computed inside."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(8)

    def build(self, shape):
        self.dense.build(shape)

    @tf.function
    def call(self, x):
        return tf.nn.gelu(self.dense(x)) * tf.sigmoid(x)


class Mapped(layers.Layer):
    """Computes row by row, in a loop."""

    def call(self, x):
        return tf.map_fn(lambda row: tf.nn.softmax(row) * tf.nn.gelu(row), x)


class Block(layers.Layer):
    """A layer of layers."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop = (
            layers.Dense(16, activation="gelu"),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
        )
        self.down = layers.Dense(8)

    def call(self, x, training=None):
        h = self.norm(self.up(x), training=training)
        return x + self.down(self.drop(h, training=training))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [Block() for _ in range(3)]
        self.head = layers.Dense(1)

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(keras.ops.mean(x, axis=1))


def data(model, samples=16, seed=0):
    rng = np.random.default_rng(seed)
    shape = model.inputs[0].shape[1:] if model.built and model.inputs else (6, 8)
    if model.built and model.inputs and model.inputs[0].dtype == "int32":
        x = rng.integers(0, 20, (samples, *shape)).astype("int32")
    else:
        x = rng.standard_normal((samples, *shape)).astype("float32")
    return x, rng.standard_normal((samples, 1)).astype("float32")


def train(build, callback=None, optimizer="adam", batch=8, epochs=2, scope=None, **compiled):
    """All variables after a training, and the losses."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    tf.random.set_seed(7)
    with (scope or tf.distribute.get_strategy()).scope():
        model = build()
        made = keras.optimizers.get(optimizer) if isinstance(optimizer, str) else optimizer()
        model.compile(made, "mse", **compiled)
    x, y = data(model)
    callbacks = [callback] if callback else []
    history = model.fit(x, y, batch, epochs, verbose=0, callbacks=callbacks, shuffle=False)
    values = {v.path: v.numpy() for v in [*model.variables, *seeds(model)]}
    return values, history.history["loss"]


def seeds(model):
    return [g.state for layer in model._flatten_layers() for g in layer._seed_generators]


@contextlib.contextmanager
def rewritten():
    """Check that steps were rewritten: a plan that nobody follows leaves the same bits, too."""
    with mock.patch("tfscale.training.recompute.run.rewrite", wraps=rewrite) as made:
        yield
    assert any(call.args[3] for call in made.call_args_list), "no step was rewritten"


@functools.cache
def plainly(build, policy, **settings):
    """A training without recomputation; ``policy`` is the one that Keras has."""
    return train(build, **settings)


def assert_same_training(build, callback=None, **settings):
    """Check that a callback leaves a training's bits the same, and return the plan."""
    callback = callback or Recompute(segments="sqrt", verbose=0)
    plain, losses = plainly(build, keras.config.dtype_policy().name, **settings)
    with rewritten():
        ours, our_losses = train(build, callback, **settings)
    assert callback.plan.again, "nothing was computed again"
    assert losses == our_losses
    assert plain.keys() == ours.keys()
    for name, value in plain.items():
        assert value.tobytes() == ours[name].tobytes(), name
    return callback.plan


def again(plan):
    """The layers in which something is computed again."""
    found = set()
    for one in plan.again:
        for op in one.ops:
            found |= plan.step.units[plan.step.unit_of[op]].layers
    return found
