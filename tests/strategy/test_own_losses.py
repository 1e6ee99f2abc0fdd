"""Losses that a program makes by itself: each is a part of the whole batch's, and counted once."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.strategy.twins import check_twins, two
from tfscale import ScaleStrategy
from tfscale.strategy.losses import own_losses

ROWS, BATCH = 33, 16  # a last batch of one row, and of 17 rows two replicas get 9 and 8
X = np.random.default_rng(1).standard_normal([ROWS, 3]).astype(np.float32)
Y = X @ np.array([[1.0], [2.0], [-1.0]], np.float32)


class Own(keras.Model):
    """``compute`` makes a loss of the model, its targets and its predictions."""

    def __init__(self, compute, batch_norm=False):
        super().__init__(name="own")
        self.body = keras.Sequential(
            [layers.Dense(4), *([layers.BatchNormalization()] if batch_norm else [])]
        )
        self.head, self.compute = layers.Dense(1), compute

    def call(self, x, training=None):
        return self.head(self.body(x, training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute(self, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def mean(model, y, predicted):
    return tf.reduce_mean(tf.square(y - predicted))


def unseen(model, y, predicted):
    """The largest error, scaled to be a mean where all errors are equal: no sum over samples."""
    errors = tf.square(y - predicted)
    return tf.reduce_max(tf.reduce_mean(errors) + 0 * errors)


def total(model, y, predicted):
    return 0.01 * tf.reduce_sum(tf.square(y - predicted))


def vector(model, y, predicted):
    return 0.01 * keras.losses.mean_squared_error(y, predicted)


def over_the_global_batch(model, y, predicted):
    """Return the loss as ``compute_average_loss`` does; the last batch is smaller, as there."""
    return tf.nn.compute_average_loss(tf.square(y - predicted)[:, 0], global_batch_size=BATCH)


def of_keras(model, y, predicted):
    return keras.losses.MeanSquaredError()(y, predicted)


def compiled(model, y, predicted):
    return model.compute_loss(None, y, predicted)


def read_share(model, y, predicted):
    return mean(model, y, predicted) / tf.distribute.get_strategy().num_replicas_in_sync


def mixed(model, y, predicted):
    """Return the loss of docs/strategy.md: means are divided, sums are not."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    error = y - predicted
    return tf.reduce_mean(tf.square(error)) / replicas + 0.01 * tf.reduce_sum(tf.abs(error))


def maker(compute, **how):
    def build():
        model = Own(compute, **how)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    return build


def fit(model):
    return model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0).history


def trained(model):
    fit(model)
    return {}


@pytest.fixture(autouse=True)
def nobody_was_told(monkeypatch):
    monkeypatch.setattr(own_losses, "_warned", set())


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "tfscale")
    return lambda: [r.getMessage() for r in caplog.records if "own_losses" in r.getMessage()]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("compute", "said"),
    [
        *((mean, "mean"), (total, "sum"), (vector, "sum"), (over_the_global_batch, "scaled")),
        *((compute, None) for compute in (mean, total, vector, over_the_global_batch)),
    ],
)
@pytest.mark.parametrize("batch_norm", [pytest.param(False, marks=pytest.mark.full), True])
def test_what_is_said_of_a_loss_makes_it_equal(compute, said, batch_norm, warnings):
    check_twins(maker(compute, batch_norm=batch_norm), trained, own_losses=said)
    assert warnings() == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("compute", [of_keras, compiled, read_share, mixed])
@pytest.mark.parametrize(
    "said", ["sum", *(pytest.param(x, marks=pytest.mark.full) for x in (None, "mean", "scaled"))]
)
def test_what_has_read_the_share_is_scaled_once_whatever_is_said(compute, said, warnings):
    check_twins(maker(compute), trained, own_losses=said)
    assert warnings() == []


def test_where_nothing_can_be_seen_a_mean_is_assumed_and_told_once(warnings):
    def twice(model):
        fit(model)
        return fit(model)

    check_twins(maker(unseen), twice)
    (told,) = warnings()
    assert "'own' (Own)" in told
    assert 'ScaleStrategy(own_losses="mean")' in told


@pytest.mark.one_in(3)
@pytest.mark.parametrize("compute", [mean, of_keras, compiled])
def test_the_same_eagerly(compute):
    def build():
        model = Own(compute)
        model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
        return model

    check_twins(build, trained, own_losses="mean")


@pytest.mark.slow
def test_what_a_step_returns_is_of_the_whole_batch():
    check_twins(maker(mean), fit, own_losses="mean")


def test_a_wrong_word_is_refused():
    with pytest.raises(ValueError, match="own_losses is 'mean', 'sum' or 'scaled'; got 'average'"):
        two(own_losses="average")


class Endpoint(layers.Layer):
    """A layer that takes targets, and adds their loss and a metric itself."""

    def __init__(self):
        super().__init__()
        self.loss = keras.losses.BinaryCrossentropy(from_logits=True)

    def call(self, logits, targets=None):
        if targets is not None:
            self.add_loss(self.loss(targets, logits))
        return ops.sigmoid(logits)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("eagerly", [False, True])
def test_a_loss_object_in_a_layer_counts_once(eagerly):
    def build():
        x, y = keras.Input([3], name="x"), keras.Input([1], name="y")
        model = keras.Model([x, y], Endpoint()(layers.Dense(1)(x), y))
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=eagerly)
        return model

    def train(model):
        targets = (Y > 0).astype(np.float32)
        return model.fit([X, targets], batch_size=BATCH, shuffle=False, verbose=0).history

    check_twins(build, train)


def test_a_metric_of_compute_loss_is_the_whole_batchs():
    class Told(Own):
        def __init__(self):
            super().__init__(compiled)
            self.tracker = keras.metrics.Mean(name="told")

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            self.tracker.update_state(loss)
            return {"told": self.tracker.result()}

    def build():
        model = Told()
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    check_twins(build, fit)


@pytest.mark.slow
def test_an_own_compute_loss_is_a_mean():
    class Huber(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return ops.mean(ops.abs(y - y_pred)) + ops.sum(self.losses)

    def build():
        model = Huber()
        model.compile(keras.optimizers.SGD(0.05))
        return model

    check_twins(build, fit, own_losses="mean")


class Parts(keras.Model):
    """Neither ``call`` nor anything else that Keras could build it by."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(4), layers.Dense(1)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self.second(self.first(x))))
        weights = self.first.trainable_weights + self.second.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


@pytest.mark.slow
def test_a_model_without_call_trains(recwarn):
    def build():
        model = Parts()
        model.compile(keras.optimizers.SGD(0.05))
        return model

    check_twins(build, fit, own_losses="mean")
    assert not [w for w in recwarn if "build" in str(w.message)]  # nothing is wrong with it


class Centred(keras.Model):
    """Takes the mean of the whole batch off, though Keras builds models outside of all replicas."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(4), layers.Dense(1)

    def call(self, x):
        x = self.first(x)
        replica = tf.distribute.get_replica_context()
        parts = [tf.reduce_sum(x, axis=0), tf.cast(tf.shape(x)[0], x.dtype)]
        total, rows = replica.all_reduce(tf.distribute.ReduceOp.SUM, parts)
        return self.second(x - total / rows)


def centred():
    model = Centred()
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", [keras.Model.fit, keras.Model.evaluate])
def test_a_call_that_talks_to_other_replicas_is_built_by_its_step(first):
    x, y = X[:32], Y[:32]  # a row that is lent to a replica without rows would be in its sums

    def train(model):
        first(model, x, y, batch_size=BATCH, verbose=0)
        history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history
        return history | {"predicted": model.predict(x, batch_size=BATCH, verbose=0)}

    check_twins(centred, train)


class Nested(Parts):
    """Keras calls its first part apart, in the step of the first replica, to see what to build."""

    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense, self.norm = layers.Dense(4), layers.BatchNormalization()

        def call(self, x):
            return self.norm(self.dense(x), training=True)

    def __init__(self):
        super().__init__()
        self.first = Nested.Block()


@pytest.mark.slow
def test_layers_that_a_step_builds_may_exchange():
    def build():
        model = Nested()
        model.compile(keras.optimizers.SGD(0.05))
        return model

    check_twins(build, fit, own_losses="mean")


def test_what_is_wrong_with_a_call_is_said_in_its_own_words():
    class Wrong(keras.Model):
        def call(self, x):
            raise RuntimeError("not like this")

    with two().scope():
        model = Wrong()
        model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="not like this"):
        model.fit(X, Y, verbose=0)


def test_one_tensor_for_all_replicas_eagerly():
    """``strategy.run`` gets such a tensor from outside of all replicas."""
    strategy = two()
    gradient = tf.constant([1.0, 2.0])
    with strategy.scope():
        variable = keras.Variable([0.0, 0.0])
        optimizer = keras.optimizers.SGD(1.0)
    strategy.run(lambda: optimizer.apply([gradient], [variable]))
    np.testing.assert_array_equal(variable, [-2.0, -4.0])


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_without_any_gradient_is_refused_by_keras_in_its_own_words(scaled):
    strategy = two()
    with strategy.scope():
        variable = keras.Variable([0.0])
        optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([None], [variable]))

    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        step()


class _OfTwo(keras.Model):
    """Losses of two tensors of a batch, of which each has rows of its own."""

    def __init__(self):
        super().__init__()
        self.dense, self.loss_fn = layers.Dense(1), keras.losses.MeanSquaredError()
        self.dense.build((None, 4))
        self.built = True

    def train_step(self, data):
        with tf.GradientTape() as tape:
            a, b = map(self.dense, data)
            loss = self.loss_fn(tf.ones_like(a), a) + 2 * self.loss_fn(tf.zeros_like(b), b)
        weights = self.dense.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rows", [(9, 5), (8, 8), (4, 9)])
def test_tensors_of_a_batch_may_have_rows_of_their_own(rows):
    rng = np.random.default_rng(0)
    batch = tuple(rng.standard_normal((count, 4), np.float32) for count in rows)

    def fitted(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = _OfTwo()
            model.compile(keras.optimizers.SGD(0.1))
        losses = model.fit(tf.data.Dataset.from_tensors(batch).repeat(3), verbose=0).history["loss"]
        return [*model.dense.get_weights(), losses]

    strategies = tf.distribute.get_strategy(), ScaleStrategy(devices=["CPU:0", "CPU:1"])
    for expected, found in zip(*map(fitted, strategies), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
