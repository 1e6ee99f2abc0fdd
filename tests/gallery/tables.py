"""Models of tables, ratings and the like, and steps with several losses."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers, ops

from tests.gallery.parts import (
    ROWS,
    Program,
    classes,
    fit,
    fit_and_judge,
    integers,
    random,
)

USERS, FILMS = 7, 9


class Recommender(keras.Model):
    """Model of who likes which film: two tables of vectors, and two of biases."""

    def __init__(self):
        super().__init__()
        penalty = keras.regularizers.l2(1e-6)
        self.user = layers.Embedding(USERS, 4, embeddings_regularizer=penalty)
        self.film = layers.Embedding(FILMS, 4, embeddings_regularizer=penalty)
        self.user_bias, self.film_bias = layers.Embedding(USERS, 1), layers.Embedding(FILMS, 1)

    def call(self, pairs):
        users, films = pairs[:, 0], pairs[:, 1]
        alike = ops.sum(self.user(users) * self.film(films), axis=-1, keepdims=True)
        return ops.nn.sigmoid(alike + self.user_bias(users) + self.film_bias(films))


def recommender():
    model = Recommender()
    model.compile(keras.optimizers.Adam(0.001), keras.losses.BinaryCrossentropy())
    return model


def pairs():
    return ops.convert_to_numpy(
        ops.stack([integers(USERS, ROWS, seed=1), integers(FILMS, ROWS, seed=2)], axis=1)
    )


def structured():
    """Named columns, each with a layer that prepares it; a text among them."""
    age, kind = keras.Input([1], name="age"), keras.Input([1], name="kind", dtype="string")
    scale = layers.Normalization()
    scale.adapt(random(ROWS, 1))
    known = layers.StringLookup(vocabulary=["a", "b", "c"], output_mode="one_hot")
    x = layers.concatenate([scale(age), known(kind)])
    x = layers.Dropout(0.0)(layers.Dense(8, activation="relu")(x))
    model = keras.Model({"age": age, "kind": kind}, layers.Dense(1, activation="sigmoid")(x))
    model.compile(
        "adam", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")]
    )
    return model


def columns():
    letters = tf.constant(["a", "b", "c", "d"])
    table = {"age": random(ROWS, 1), "kind": tf.gather(letters, integers(4, ROWS, 1))}
    return tf.data.Dataset.from_tensor_slices((table, classes(2))).batch(8)


def imbalanced():
    model = keras.Sequential(
        [
            keras.Input([5]),
            layers.Dense(8, activation="relu"),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    metrics = [keras.metrics.FalseNegatives(name="fn"), keras.metrics.Precision(name="precision")]
    model.compile(keras.optimizers.Adam(1e-2), "binary_crossentropy", metrics=metrics)
    return model


class LogisticEndpoint(layers.Layer):
    """Keras's guide: a layer that has the loss and the metric of its output."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, logits, targets=None, sample_weight=None):
        if targets is not None:
            self.add_loss(self.loss_fn(targets, logits, sample_weight))
            self.accuracy.update_state(targets, logits, sample_weight)
        return ops.softmax(logits)


def endpoint():
    inputs, targets = keras.Input([3], name="inputs"), keras.Input([2], name="targets")
    logits = layers.Dense(2)(inputs)
    model = keras.Model([inputs, targets], LogisticEndpoint(name="predictions")(logits, targets))
    model.compile("adam")
    return model


def with_targets():
    return {"inputs": random(ROWS, 3), "targets": ops.convert_to_numpy(ops.one_hot(classes(2), 2))}


class SeveralLosses(keras.Model):
    """A step of its own: compiled loss, a loss object, and regularization, each told apart."""

    def __init__(self):
        super().__init__()
        self.body = layers.Dense(8, activation="relu", kernel_regularizer="l2")
        self.head, self.again = layers.Dense(1), layers.Dense(5)
        self.rebuilt = keras.losses.MeanSquaredError()
        self.total, self.part = keras.metrics.Mean(name="total"), keras.metrics.Mean(name="part")

    @property
    def metrics(self):
        return [self.total, self.part]

    def call(self, x):
        x = self.body(x)
        return self.head(x), self.again(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            guess, rebuilt = self(x, training=True)
            part = self.rebuilt(x, rebuilt)
            loss = self.compute_loss(x, y, guess) + 0.5 * part
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.total.update_state(loss)
        self.part.update_state(part)
        return {m.name: m.result() for m in self.metrics}


def several_losses():
    model = SeveralLosses()
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss="mse")
    return model


PROGRAMS = {
    "recommender": Program(recommender, fit_and_judge(pairs, lambda: random(ROWS, 1, low=0))),
    "structured data": Program(structured, fit(columns, batch_size=None)),
    "imbalanced classes": Program(
        imbalanced,
        fit_and_judge(lambda: random(ROWS, 5), lambda: classes(2), class_weight={0: 0.2, 1: 1.0}),
    ),
    "endpoint layer": Program(endpoint, fit(with_targets)),
    "several losses": Program(
        several_losses, fit(lambda: random(ROWS, 5), lambda: random(ROWS, 1, seed=1))
    ),
}
