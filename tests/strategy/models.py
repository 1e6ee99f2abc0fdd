"""Tiny models and data for the table of cases: each part of Keras that replicas could get wrong.

A build is a function without arguments that returns a compiled model. A train is a function of a
model that trains it for 20 steps and returns what its user sees, by name.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, optimizers

from tfscale import quantize

BATCH, STEPS, EPOCHS = 16, 10, 2  # few epochs: beginning one costs more than a step
ROWS = (STEPS - 1) * BATCH + 11
FEATURES, CLASSES = 6, 3
WORDS, LENGTH = 20, 7

SGD = partial(optimizers.SGD, learning_rate=0.1)
ADAM = partial(optimizers.Adam, learning_rate=0.01)
cross_entropy = partial(losses.SparseCategoricalCrossentropy, from_logits=True)


# ---- data


def numbers(rows=ROWS):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, FEATURES), np.float32)
    return x, (x @ rng.standard_normal((FEATURES, CLASSES))).argmax(1).astype(np.int32)


def sentences(rows=ROWS, words=WORDS):
    """Words with zeros behind; long ones come last in each batch, so that replicas differ."""
    rng = np.random.default_rng(rows)
    x = rng.integers(1, words, (rows, LENGTH), np.int32)
    length = 1 + np.arange(rows) % BATCH * LENGTH // BATCH
    x[np.arange(LENGTH) >= length[:, None]] = 0
    return x, x % CLASSES


def topics(rows=ROWS, words=WORDS):
    x, _ = sentences(rows, words)
    return x, x.sum(1) % CLASSES


def distinct(rows=ROWS):
    """No word twice: one device's Adam squares the gradients of a word's places one by one."""
    x = 1 + np.random.default_rng(rows).permutation(rows * LENGTH).reshape(rows, LENGTH)
    return x.astype(np.int32), (x.sum(1) % CLASSES).astype(np.int32)


def weights(rows=ROWS, *shape):
    return np.random.default_rng(1).uniform(0, 2, (rows, *shape)).astype(np.float32)


def overflowing():
    """One number that half precision cannot hold, for the last replica in the second batch."""
    x, y = numbers()
    x[2 * BATCH - 1, 0] = 1e5
    return x, y


def row_by_row(rows=ROWS):
    return tf.data.Dataset.from_tensor_slices(numbers(rows))


def worker():
    """Return the number of workers, and the index of this one."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    return (len(config["cluster"]["worker"]), config["task"]["index"]) if config else (1, 0)


# ---- models


def dense(inputs, **settings):
    return layers.Dense(8, activation="tanh", **settings)(inputs)


def batch_norm(inputs, **settings):
    hidden = layers.Dense(8, use_bias=False)(inputs)
    return layers.Activation("tanh")(layers.BatchNormalization(momentum=0.9, **settings)(hidden))


class Penalty(layers.Layer):
    """Adds a loss of its own."""

    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def embedded(inputs, words=WORDS):
    return layers.GlobalAveragePooling1D()(layers.Embedding(words, 4)(inputs))


def masked(inputs):
    return layers.Embedding(WORDS, 4, mask_zero=True)(inputs)


def words(inputs):
    return layers.Embedding(WORDS, 4)(inputs)


def masked_time_distributed(inputs):
    return layers.TimeDistributed(layers.Dense(5, activation="tanh"))(masked(inputs))


def masked_lstm(inputs):
    return layers.LSTM(5, return_sequences=True)(masked(inputs))


def function_of_means(y, predicted):
    """A focal loss of one number, and a root of a mean."""
    error = cross_entropy()(y, predicted)
    size = tf.sqrt(tf.reduce_mean(tf.square(predicted)))
    return error * (1 - tf.exp(-error)) ** 2 + 0.01 * size


def mean_of_a_batch(y_true, y_pred):
    """A function of the user's own, which leaves nothing for Keras to reduce."""
    return keras.ops.mean(cross_entropy(reduction="none")(y_true, y_pred))


def classifier(optimizer, body=dense, loss=cross_entropy, inputs=FEATURES, dtype="float32", **how):
    def build():
        first = keras.Input([inputs], dtype=dtype)
        model = keras.Model(first, layers.Dense(CLASSES, dtype="float32")(body(first)))
        model.compile(optimizer(), loss(), **{"metrics": ["accuracy"], **how})
        return model

    return build


def reader(optimizer, body, **how):
    """A classifier of sentences or of their words."""
    return classifier(optimizer, body, inputs=LENGTH, dtype="int32", **how)


def under(policy, build):
    """Return a build under a policy, such as mixed precision."""

    def build_under():
        before = keras.mixed_precision.dtype_policy()
        keras.mixed_precision.set_dtype_policy(policy)
        try:
            return build()
        finally:
            keras.mixed_precision.set_dtype_policy(before)

    return build_under


def few_bits(build, **how):
    """Return a build of a model that computes with 4 bits."""

    def build_small():
        model = build()
        plan = {layer.path: 4 for layer in model.layers if layer.weights}
        return quantize.apply(model, plan, numbers()[0], **how)

    return build_small


def several_outputs():
    inputs = keras.Input([FEATURES])
    hidden = dense(inputs)
    outputs = {"kind": layers.Dense(CLASSES)(hidden), "size": layers.Dense(1)(hidden)}
    model = keras.Model(inputs, outputs)
    model.compile(
        SGD(learning_rate=0.02, momentum=0.9),
        {"kind": cross_entropy(), "size": "mse"},
        loss_weights={"kind": 0.7, "size": 0.4},
        metrics={"kind": "accuracy", "size": "mae"},
    )
    return model


class OwnStep(keras.Model):
    """A train step as Keras's guide writes it, with a metric of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.hits = keras.metrics.SparseCategoricalAccuracy(name="hits")

    @property
    def metrics(self):
        return [self.hits]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted)
        gradients = self.changed(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply(gradients, self.trainable_variables)
        self.hits.update_state(y, predicted)
        return {"hits": self.hits.result()}

    def changed(self, gradients):
        return gradients


class Clipped(OwnStep):
    """A step that clips the norm of all gradients before the optimizer gets them."""

    def changed(self, gradients):
        return tf.clip_by_global_norm(gradients, 0.05)[0]


class AddsWeights(OwnStep):
    """A step that decays weights by itself, by their gradients' size and a random number."""

    def changed(self, gradients):
        tiny = 1e-12 * tf.random.normal([])
        every = zip(gradients, self.trainable_variables)
        return [g + (0.1 + tiny) * tf.norm(g) * tf.convert_to_tensor(w) for g, w in every]


class BuiltInStep(keras.Model):
    """A step that calls, and so builds, a layer that ``call`` does not call."""

    def __init__(self):
        super().__init__()
        self.body, self.head = layers.Dense(8, activation="tanh"), layers.Dense(CLASSES)

    def call(self, inputs):
        return self.body(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self.head(self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class BuiltInTraining(keras.Model):
    """A layer that is called, and so built, in training only."""

    def __init__(self):
        super().__init__()
        self.head, self.noisy = layers.Dense(CLASSES), layers.Dense(CLASSES)

    def call(self, inputs, training=False):
        return self.head(inputs) + self.noisy(inputs) if training else self.head(inputs)


def built_late(kind, optimizer):
    def build():
        model = kind()
        model.compile(optimizer(), cross_entropy())
        return model

    return build


class OneHot(keras.Model):
    """A step that gives its compiled loss and metrics other targets than the data has."""

    def train_step(self, data):
        x, y = data
        return super().train_step((x, keras.ops.one_hot(y, CLASSES)))


def one_hot_step():
    inputs = keras.Input([FEATURES])
    model = OneHot(inputs, layers.Dense(CLASSES)(dense(inputs)))
    loss = losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    model.compile(SGD(momentum=0.9), loss, metrics=["accuracy"])
    return model


class Climber(OwnStep):
    """Sharpness-aware minimization: gradients of where the gradient leads uphill."""

    def train_step(self, data):
        x, y = data
        moves = self._gradients(x, y)
        for weight, move in zip(self.trainable_variables, moves, strict=True):
            weight.assign_add(0.05 * move)
        gradients = self._gradients(x, y)
        for weight, move in zip(self.trainable_variables, moves, strict=True):
            weight.assign_sub(0.05 * move)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"hits": self.hits.result()}

    def _gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        return tape.gradient(loss, self.trainable_variables)


def climber():
    inputs = keras.Input([FEATURES])
    model = Climber(inputs, layers.Dense(CLASSES)(dense(inputs)))
    model.compile(SGD(momentum=0.9), cross_entropy())
    return model


class Hits(keras.metrics.Metric):
    """Keras's guide's metric of one's own; ``read`` makes of its variable what it tells."""

    def __init__(self, name, read):
        super().__init__(name=name)
        self.hits, self.read = self.add_variable((), "zeros", name="hits"), read

    def update_state(self, y_true, y_pred, sample_weight=None):
        hits = keras.ops.equal(keras.ops.argmax(y_pred, 1), keras.ops.cast(y_true, "int64"))
        self.hits.assign_add(keras.ops.sum(keras.ops.cast(hits, "float32")))

    def result(self):
        return self.read(self.hits)


def own_metrics():
    """Made together with the model."""
    metrics = [Hits("value", lambda hits: hits.value), Hits("variable", lambda hits: hits)]
    return classifier(SGD, metrics=metrics)()


class MaskedStep(keras.Model):
    """A step whose loss object divides by what masks have left."""

    def __init__(self, loss):
        super().__init__()
        self.words, self.head = layers.Embedding(WORDS, 4, mask_zero=True), layers.Dense(CLASSES)
        self.distance, self.told = loss, keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.told]

    def call(self, x):
        return self.head(self.words(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.distance(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.told.update_state(loss)
        return {"loss": self.told.result()}


def masked_step():
    model = MaskedStep(cross_entropy(ignore_class=1))
    model.compile(SGD(momentum=0.9))
    return model


def own_step():
    inputs = keras.Input([FEATURES])
    model = OwnStep(inputs, layers.Dense(CLASSES)(dense(inputs)))
    model.compile(SGD(momentum=0.9, global_clipnorm=0.05), cross_entropy())
    return model


def own_step_that(kind, optimizer=SGD):
    """A step that changes gradients, of weights and of the rows of a table."""

    def make():
        words = keras.Input([LENGTH], dtype="int32")
        x = layers.Flatten()(layers.Embedding(WORDS, 4)(words))
        model = kind(words, layers.Dense(CLASSES)(dense(x)))
        model.compile(optimizer(), cross_entropy())
        return model

    return make


class Adversaries(keras.Model):
    """Two networks and two optimizers in one step; the noise is data, the same everywhere."""

    def __init__(self):
        super().__init__()
        self.forger = keras.Sequential(
            [keras.Input([2]), layers.Dense(8, activation="tanh"), layers.Dense(FEATURES)]
        )
        self.critic = keras.Sequential(
            [keras.Input([FEATURES]), layers.Dense(8, activation="tanh"), layers.Dense(1)]
        )
        self.distance = keras.metrics.MeanSquaredError(name="distance")

    def compile(self, forger_optimizer, critic_optimizer):
        super().compile()
        self.forger_optimizer, self.critic_optimizer = forger_optimizer, critic_optimizer
        self.doubt = losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self):
        return [self.distance]

    def call(self, noise):
        return self.critic(self.forger(noise))

    def train_step(self, data):
        noise, real = data
        with tf.GradientTape(persistent=True) as tape:
            forged = self.forger(noise)
            seen, faked = self.critic(real), self.critic(forged)
            critic_loss = self.doubt(tf.ones_like(seen), seen)
            critic_loss += self.doubt(tf.zeros_like(faked), faked)
            forger_loss = self.doubt(tf.ones_like(faked), faked)
        self._descend(tape, critic_loss, self.critic, self.critic_optimizer)
        self._descend(tape, forger_loss, self.forger, self.forger_optimizer)
        self.distance.update_state(real, forged)
        return {"distance": self.distance.result()}

    def _descend(self, tape, loss, network, optimizer):
        gradients = tape.gradient(loss, network.trainable_variables)
        optimizer.apply_gradients(zip(gradients, network.trainable_variables))


def adversaries():
    model = Adversaries()
    model.compile(ADAM(clipnorm=0.1), SGD(momentum=0.9))
    return model


# ---- training


def fit(data=numbers, **settings):
    """``data`` makes x, or x and y; what it makes is fresh for each training."""

    def train(model):
        made = data()
        x, y = made if isinstance(made, tuple) else (made, None)
        batch = BATCH if y is not None else None
        how = {"batch_size": batch, "epochs": EPOCHS, "shuffle": False, "verbose": 0, **settings}
        return dict(model.fit(x, y, **how).history)

    return train


def dataset(rows=ROWS, policy=None):
    """Make data with tf.data, under a policy of sharding."""
    batches = row_by_row(rows).batch(BATCH)
    if policy is None:
        return batches
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return batches.with_options(options)


def shuffled():
    """Each epoch in an order of its own."""
    return row_by_row().shuffle(ROWS, seed=1).batch(BATCH)


def own_shards():
    """Under OFF a worker goes through all that it is given, so its user gives it a share.

    TensorFlow still divides the batch size by the workers, so all workers' shares of a batch
    together are the batch that one device gets. Keras counts the steps before that: `fit` has
    to be told how many there are.
    """
    count, index = worker()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    mine = row_by_row(STEPS * BATCH).shard(count, index)
    return mine.batch(BATCH).repeat().with_options(options)


def short_first():
    """A first batch of 5 rows."""
    rows = row_by_row((STEPS - 1) * BATCH + 5)
    return rows.take(5).batch(BATCH).concatenate(rows.skip(5).batch(BATCH))


def batches(x, y):
    return [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, len(x), BATCH)]


def generator():
    while True:
        yield from batches(*numbers())


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return len(batches(*numbers()))

    def __getitem__(self, index):
        return batches(*numbers())[index]


def fit_files(model):
    """Four files, from which one device or several workers take rows in turn."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE

    def parse(line):
        values = tf.strings.to_number(tf.strings.split(line))
        return values[:-1], tf.cast(values[-1], tf.int32)

    with tempfile.TemporaryDirectory() as folder:
        x, y = numbers(STEPS * BATCH)
        for i in range(4):
            np.savetxt(Path(folder) / f"{i}.txt", np.c_[x, y][i::4], "%.9g")
        files = tf.data.Dataset.list_files(f"{folder}/*.txt", shuffle=False)
        rows = files.interleave(tf.data.TextLineDataset, cycle_length=4)
        return fit(lambda: rows.map(parse).batch(BATCH).with_options(options))(model)


def two_targets():
    x, y = numbers()
    return x, {"kind": y, "size": x[:, :1] ** 2}


def noise_and_real():
    x, _ = numbers()
    return weights(ROWS, 2) - 1, x


class EachBatchSlower(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (batch + 1)


def fit_and_tell_curvature(model):
    """AdaHessian's D of a first batch, which does not divide by 2."""
    seen = fit(partial(numbers, 11), epochs=1)(model)
    kept = 1 - model.optimizer.beta_2
    terms = [np.sqrt(v.numpy() / kept) for v in model.optimizer._velocities]
    return seen | {f"D {i}": term for i, term in enumerate(terms)}


def fit_and_judge(model):
    """Validation, evaluate and predict, on rows that do not divide."""
    others = numbers(37)
    seen = fit(validation_data=others)(model)
    seen["evaluate"] = model.evaluate(*others, batch_size=BATCH, verbose=0)
    seen["predict"] = model.predict(others[0], batch_size=BATCH, verbose=0)
    seen["predict one row"] = model.predict(others[0][:1], verbose=0)
    return seen


def fit_and_judge_a_dataset(model):
    seen = fit(dataset, validation_data=dataset(37))(model)
    seen["evaluate"] = model.evaluate(dataset(37), verbose=0)
    seen["predict"] = model.predict(dataset(37).map(lambda x, y: x), verbose=0)
    return seen


def on_batches(model):
    """Train every worker on the same batch, as one would give it to one device."""
    taken = batches(*numbers()) * EPOCHS
    return {
        "train_on_batch": [model.train_on_batch(x, y) for x, y in taken],
        "test_on_batch": [model.test_on_batch(x, y) for x, y in taken[:5]],
    }


def fit_and_predict_on_batch(model):
    return fit()(model) | {"predict_on_batch": model.predict_on_batch(numbers(BATCH)[0])}
