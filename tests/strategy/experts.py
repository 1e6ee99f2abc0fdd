"""Models with experts, and everything that a training shows."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers

from tfscale.parallel import Experts


def perceptron(k=2, **more):
    x = inputs = keras.Input((6,))
    x = layers.Dense(8, "tanh", name="first")(x)
    x = x + Experts(4, 12, k=k, activation="tanh", name="experts", **more)(x)
    return keras.Model(inputs, layers.Dense(3)(layers.BatchNormalization()(x)))


def capped():
    return perceptron(capacity=1.0)


def dense():
    """Tokens go to all experts, so rounding moves results and never turns a choice."""
    return perceptron(k=4)


def lopsided():
    """All tokens first go to experts 0 and 1, which the first of two replicas holds."""
    return perceptron(router_initializer="zeros")


def regular():
    return perceptron(kernel_regularizer="l2", use_bias=False, balance=0)


def twice():
    """One layer of experts, which is used twice."""
    x = inputs = keras.Input((6,))
    experts = Experts(4, 5, k=1, name="experts", balance=0.1)
    x = experts(x + experts(x))
    return keras.Model(inputs, layers.Dense(3)(x))


class Block(layers.Layer):
    """Transformer block whose second half is experts, as a user writes it."""

    def __init__(self, **more):
        super().__init__(**more)
        self.attention = layers.MultiHeadAttention(2, 4)
        self.experts = Experts(8, 16, k=2)
        self.norm = layers.LayerNormalization()
        self.supports_masking = True

    def call(self, x, mask=None):
        x = x + self.attention(x, x)
        return x + self.experts(self.norm(x), mask=mask)


class Language(keras.Model):
    """Subclassed model with masked tokens, whose two blocks have experts."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(16, 8, mask_zero=True)
        self.blocks = [Block(), Block()]
        self.last = layers.Dense(3)

    def call(self, words):
        x = self.table(words)
        mask = self.table.compute_mask(words)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.last(keras.ops.mean(x, 1))


class OwnStep(keras.Model):
    """Model with a step and a loss of its own, to which it adds the losses of its layers."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(8, "tanh")
        self.experts = Experts(4, 64, k=2, balance=0.5)  # shard="all" cuts weights of this size
        self.last = layers.Dense(3)

    def call(self, x):
        x = self.first(x)
        return self.last(x + self.experts(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            wrong = tf.one_hot(y, 3, dtype=x.dtype) - self(x, training=True)
            loss = tf.reduce_mean(tf.reduce_mean(tf.square(wrong), -1)) + sum(self.losses)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: optimizers.Adam(0.01, epsilon=1e-4, global_clipnorm=0.3),
    "clipping": lambda: optimizers.SGD(0.1, clipnorm=0.05, gradient_accumulation_steps=2),
    "averaging": lambda: optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "scaling": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=1024.0),
}


def data(model, rows=50):
    draw = np.random.default_rng(0)
    y = draw.integers(0, 3, rows)
    if isinstance(model, Language):
        return draw.integers(0, 16, (rows, 5)), y
    return draw.standard_normal((rows, 6)), y


def made(strategy, program, optimizer="sgd", **more):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = program()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # Keras cannot show a metric that a step of the user's own does not update.
        metrics = None if isinstance(model, OwnStep) else ["accuracy"]
        model.compile(OPTIMIZERS[optimizer](), loss, metrics=metrics, **more)
    return model


def numbers(model):
    return [np.array(v.numpy()) for v in (*model.weights, *model.optimizer.variables)]


def trained(model, epochs=5, batch=16, rows=50):
    """Return all numbers that a training leaves or shows; last batches have 2 rows or 1."""
    x, y = data(model, rows)
    own = {"validation_data": (x[:29], y[:29]), "validation_batch_size": 7, "verbose": 0}
    history = model.fit(x, y, batch, epochs, shuffle=False, **own).history
    shown = [*history.values(), model.evaluate(x, y, 15, verbose=0)]
    return [*numbers(model), *map(np.array, shown), model.predict(x[:31], 15, verbose=0)]
