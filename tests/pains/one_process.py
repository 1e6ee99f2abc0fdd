"""Complaints about several devices of one process."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers

from tests.gallery.parts import BATCH, ROWS, classes, fit, fit_and_judge, images, integers, random
from tests.pains.complaint import Complaint

EVEN = 4 * BATCH


def table(rows=ROWS):
    return lambda: random(rows, 6)


def kinds(rows=ROWS):
    return lambda: classes(3, rows)


def classifier(optimizer, *body, **how):
    """A build: a small classifier with these layers in its middle, each made anew."""

    def build():
        middle = [make() for make in body] or [layers.Dense(8, activation="relu")]
        model = keras.Sequential([keras.Input([6]), *middle, layers.Dense(3, dtype="float32")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"], **how)
        return model

    return build


def adam(**settings):
    return lambda: keras.optimizers.Adam(0.01, **settings)


def in_half_precision(build):
    """Return a build under the global policy that such threads set."""

    def half():
        keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            return build()
        finally:
            keras.mixed_precision.set_global_policy("float32")

    return half


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def loss_scaled():
    return keras.optimizers.LossScaleOptimizer(sgd())


class MeanOfAllReplicas(layers.Layer):
    """Takes the mean of the whole batch off its inputs, as synchronized statistics do."""

    def call(self, inputs, training=False):
        replica = tf.distribute.get_replica_context()
        if replica is None or not training:  # None while Keras builds the model
            return inputs
        total = tf.reduce_sum(inputs, axis=0)
        rows = tf.cast(tf.shape(inputs)[0], inputs.dtype)
        total, rows = replica.all_reduce(tf.distribute.ReduceOp.SUM, [total, rows])
        return inputs - total / rows


def segmenter():
    """A class for each pixel, so that what replicas predict has many axes."""
    layer = layers.Conv2D
    body = [layer(4, 3, padding="same"), MeanOfAllReplicas(), layers.Activation("relu")]
    model = keras.Sequential([keras.Input([8, 8, 1]), *body, layer(3, 1)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(sgd(), loss, metrics=["accuracy"])
    return model


def segment(model):
    """Train on batches that all replicas share, and judge by batches of which one gets nothing."""
    seen = fit(lambda: images(rows=EVEN), lambda: integers(3, EVEN, 8, 8))(model)
    x, y = images(), integers(3, ROWS, 8, 8)
    judged = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    seen |= {f"evaluated {name}": value for name, value in judged.items()}
    return seen | {"predicted": model.predict(x, batch_size=BATCH, verbose=0)}


class Accumulating(keras.Model):
    """A step of one's own that adds gradients up, and applies them in every second step."""

    def build_accumulators(self):
        self.seen = tf.Variable(0, trainable=False)
        self.sums = [
            tf.Variable(tf.zeros_like(each), trainable=False) for each in self.trainable_variables
        ]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        for kept, gradient in zip(
            self.sums, tape.gradient(loss, self.trainable_variables), strict=True
        ):
            kept.assign_add(gradient)
        self.seen.assign_add(1)
        tf.cond(self.seen % 2 == 0, self.apply_sums, lambda: None)
        return {"loss": loss}

    def apply_sums(self):
        means = [kept / 2 for kept in self.sums]
        self.optimizer.apply_gradients(zip(means, self.trainable_variables, strict=True))
        for kept in self.sums:
            kept.assign(tf.zeros_like(kept))


def accumulating():
    inputs = keras.Input([6])
    hidden = layers.Dense(8, activation="relu")(inputs)
    model = Accumulating(inputs, layers.Dense(3)(hidden))
    model.build_accumulators()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(sgd(), loss)
    return model


def numbers_and_words():
    """Numbers beside strings, of which a layer makes numbers."""
    numbers = keras.Input([2], name="numbers")
    words = keras.Input([2], name="words", dtype="string")
    known = layers.StringLookup(vocabulary=["foo", "bar", "baz"])(words)
    vectors = layers.Flatten()(layers.Embedding(4, 3)(known))
    outputs = layers.Dense(1, activation="sigmoid")(layers.Concatenate()([numbers, vectors]))
    model = keras.Model([numbers, words], outputs)
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"])
    return model


def rows_of_numbers_and_words():
    """Five rows in batches of two: the last batch has one row."""
    words = tf.constant(
        [["foo", "bar"], ["baz", "qux"], ["bar", "bar"], ["foo", "foo"], ["", "foo"]]
    )
    inputs = (random(5, 2), words)
    return tf.data.Dataset.from_tensor_slices((inputs, classes(2, 5)[:, None])).batch(2)


COMPLAINTS = {
    "tf#33929": Complaint(
        classifier(adam(clipnorm=0.05)),
        fit(table(), kinds()),
        title="Optimizer clipvalue and clipnorm not working in Tensorflow 2.0",
    ),
    "keras#16633": Complaint(
        classifier(adam(gradient_accumulation_steps=2)),
        fit(table(), kinds()),
        title="Gradient accumulation support?",
    ),
    "keras#19246": Complaint(
        segmenter,
        segment,
        title="INVALID_ARGUMENT: You must feed a value for placeholder tensor",
    ),
    "tf-keras#301": Complaint(
        accumulating,
        fit(table(EVEN), kinds(EVEN)),
        title="RuntimeError: `merge_call` called while defining a new graph or a tf.function.",
    ),
    "keras#18666": Complaint(
        in_half_precision(classifier(loss_scaled)),
        fit(table(), kinds()),
        tolerance=1e-3,
        why="Keras rounds each replica's gradients to float16",
        title="[tensorflow] MirroredStrategy, LossScaledOptimizer - merge_call failed",
    ),
    "keras#21366": Complaint(
        in_half_precision(classifier(adam(), jit_compile=True)),
        fit(table(), kinds()),
        refusal="jit_compile",
        title=(
            "LossScaleOptimizer crash under jit_compile=True with MirroredStrategy and "
            "mixed_precision"
        ),
    ),
    "tf#87432": Complaint(
        classifier(adam()),
        fit_and_judge(table(), kinds()),
        title="NaN loss on multi-gpu training",
    ),
    "keras#21172": Complaint(
        numbers_and_words,
        fit(rows_of_numbers_and_words, batch_size=None),
        title="Distributed training with tensorflow doesn't work with Keras 3.7 and above",
    ),
    "keras#20611": Complaint(
        classifier(adam(), lambda: layers.Dense(8, activation="gelu"), lambda: layers.Dropout(0.2)),
        fit(table(), kinds()),
        equal=False,
        why="each replica draws its own random numbers",
        title="Model with dropout in MirroredStrategy not work on latest keras and tf",
    ),
}
