"""Small models of several kinds, and an attack by hand."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

ROWS, BATCH = 61, 15  # the last batch has one row


def numbers(rows=ROWS, width=6):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    return x, (x.sum(1, keepdims=True) > 0).astype(np.float32)


def dense(*more, optimizer=None, **how):
    """A classifier with whatever layers are to be tried in it."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"), *more]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer or momentum(), loss, metrics=["accuracy"], **how)
    return model


def momentum(**how):
    return keras.optimizers.SGD(0.1, momentum=0.9, **how)


def fit(model, *callbacks, **how):
    x, y = numbers()
    how = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **how}
    return model.fit(x, y, callbacks=list(callbacks), **how)


def moved_by_hand(model, x, y, epsilon, sample_weight=None):
    """FGSM as its formula says."""
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = model.compute_loss(x, y, model(x, training=False), sample_weight)
    return x.numpy() + np.float32(epsilon) * np.sign(tape.gradient(loss, x).numpy())


def by_hand(model, epsilon, epochs=2):
    """A training in which each batch is moved first, without the callback."""
    x, y = numbers()
    for _ in range(epochs):
        for begin in range(0, ROWS, BATCH):
            rows = slice(begin, begin + BATCH)
            model.train_on_batch(moved_by_hand(model, x[rows], y[rows], epsilon), y[rows])
    return model


def state(model):
    """All that a training changes, seeds and statistics included."""
    return [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]


def difference(model, other):
    return max(np.abs(a - b).max() for a, b in zip(state(model), state(other), strict=True))
