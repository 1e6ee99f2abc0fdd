"""Programs of kinds that keras.io shows, with losses, metrics and data that come by odd ways."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

ROWS, BATCH, STEPS, WORDS, COLUMNS = 39, 16, 5, 7, 11
DICE = np.random.default_rng(1)
X = DICE.standard_normal([ROWS, 3]).astype(np.float32)
Y = (X @ np.array([[1.0], [2.0], [-1.0]]) + 0.1).astype(np.float32)
SEQUENCES = DICE.standard_normal([ROWS, STEPS, 3]).astype(np.float32)
# 0 means "no word".
LENGTHS = 1 + np.arange(ROWS) % STEPS
LABELS = DICE.integers(1, WORDS, [ROWS, STEPS]) * (np.arange(STEPS) < LENGTHS[:, None])


def masked():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)


GLOBAL = masked()
MSE = keras.losses.MeanSquaredError()
HELD = {"words": GLOBAL, "list": [GLOBAL]}


class Tagger(keras.Model):
    """Model whose ``loss_of(model, y, predicted)`` is the loss that its ``train_step`` minimizes.

    A log named "loss" alone would be Keras's own tracker, which nobody tells of this loss.
    """

    def __init__(self, loss_of, classes=WORDS):
        super().__init__(name="own")
        self.dense, self.loss_of = layers.Dense(classes), loss_of

    def call(self, x, training=None):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return self.logs(x, loss)

    def logs(self, x, loss):
        return {"minimized": loss}


class Adds(layers.Layer):
    """``add_loss`` of something that a layer computes of its inputs."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def call(self, x):
        self.add_loss(self.compute(x))
        return x


class Logs(keras.Model):
    """Keras's documented way to log more: ``compute_metrics``."""

    def __init__(self, key):
        inputs = keras.Input([3])
        super().__init__(inputs, layers.Dense(1)(inputs))
        self.seen, self.key = keras.metrics.Mean(name="seen"), key

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.seen.update_state(ops.abs(y_pred))
        return results | {self.key: self.seen.result(), "largest": ops.mean(ops.square(y_pred))}


class Tracked(Tagger):
    """A step that tells metrics of its loss, as on keras.io."""

    def __init__(self, loss_of):
        super().__init__(loss_of, 1)
        self.mean, self.sum = keras.metrics.Mean(name="mean"), keras.metrics.Sum(name="sum")
        self.weighted = keras.metrics.Mean(name="weighted")

    @property
    def metrics(self):
        return [self.mean, self.sum, self.weighted]

    def logs(self, x, loss):
        self.mean.update_state(loss)
        self.sum.update_state(loss)
        self.weighted.update_state(loss, sample_weight=tf.shape(x)[0])
        return {metric.name: metric.result() for metric in self.metrics}


def distiller(by_name=False):
    keras.utils.set_random_seed(2)
    teacher = keras.Sequential([keras.Input([3]), layers.Dense(4)])
    student = keras.Sequential([keras.Input([3]), layers.Dense(4)])
    model = keras.distillation.Distiller(
        teacher=teacher,
        student=student,
        distillation_losses=keras.distillation.LogitsDistillation(temperature=2.0),
        student_loss_weight=0.4,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    name = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.SGD(0.05), name if by_name else loss, metrics=["accuracy"])
    return model


def sparse_rows():
    """Rows that share a few columns of many."""
    cells = {(row, (row * step) % COLUMNS) for row in range(ROWS) for step in (1, 3, 5)}
    ones = np.ones(len(cells), np.float32)
    rows = tf.sparse.SparseTensor(sorted(cells), ones, [ROWS, COLUMNS])
    return tf.data.Dataset.from_tensor_slices((rows, Y)).batch(BATCH)


class Looked(layers.Layer):
    """Means of a table's rows, for each sample those of its own columns."""

    def build(self, shape):
        self.table = self.add_weight(shape=[COLUMNS, 2], name="table")

    def call(self, x):
        ids = tf.SparseTensor(x.indices, x.indices[:, 1], x.dense_shape)
        return tf.nn.embedding_lookup_sparse(self.table.value, ids, None, combiner="mean")


def of_sparse_rows(optimizer="Adam", lookup=False):
    inputs = keras.Input([COLUMNS], sparse=True)
    first = Looked() if lookup else layers.Dense(2)
    model = keras.Model(inputs, layers.Dense(1)(first(inputs)))
    model.compile(getattr(keras.optimizers, optimizer)(0.05), "mse")
    return model


# ----------------------------------------------- for the table of cases: without arguments


def regression():
    return X, Y


def words():
    return SEQUENCES, LABELS


def topics():
    return X, LABELS[:, :1] % 4


def _compiled(model, **how):
    model.compile(keras.optimizers.SGD(0.05), **how)
    return model


def beside_a_loss_object():
    def loss_of(model, y, predicted):
        return MSE(y, predicted) + 0.3 * tf.reduce_mean(tf.abs(predicted))

    return _compiled(Tracked(loss_of))


def global_loss_object():
    return _compiled(Tagger(lambda model, y, predicted: GLOBAL(y, predicted)))


def masked_mean():
    def loss_of(model, y, predicted):
        kept = tf.cast(y > 0.5, predicted.dtype)
        return tf.reduce_sum(tf.abs(predicted) * kept) / tf.reduce_sum(kept)

    return _compiled(Tagger(loss_of, 1))


def adds_a_sum():
    inputs = keras.Input([3])
    added = Adds(lambda x: 0.01 * ops.sum(ops.square(x)))(layers.Dense(1)(inputs))
    return _compiled(keras.Model(inputs, added), loss="mse")


def logs_more():
    return _compiled(Logs("another"), loss="mse", metrics=["mae"])
