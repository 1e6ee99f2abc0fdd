"""Gradients that reach an optimizer by odd ways: the training is that of one device.

A class of the user's may change them in ``apply_gradients``, a program may keep them in variables
and pass these, sum them over replicas by itself, or differentiate several losses at once.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.strategy.strangers import BATCH, X, Y
from tests.strategy.twins import check_twins, two

SGD = functools.partial(keras.optimizers.SGD, 0.1)


class Own(keras.Model):
    """Model whose step is ``step(model, x, y)``; ``make(model)`` gives it more variables."""

    def __init__(self, step, make=lambda model: None):
        super().__init__()
        self.first, self.second = layers.Dense(4, "tanh"), layers.Dense(1)
        self.step, self.make = step, make

    def build(self, shape):
        self.first.build(shape)
        self.second.build([None, 4])
        self.make(self)

    def call(self, x, training=None):
        return self.second(self.first(x))

    def train_step(self, data):
        return self.step(self, *data)

    def loss_of(self, x, y):
        return self.compute_loss(x=x, y=y, y_pred=self(x, training=True))

    def gradients(self, x, y, loss_of=loss_of):
        with tf.GradientTape() as tape:
            loss = loss_of(self, x, y)
        return loss, tape.gradient(loss, weights_of(self))


def weights_of(model):
    return [*model.first.trainable_variables, *model.second.trainable_variables]


def mean_loss(model, x, y):
    return tf.reduce_mean(tf.square(y - model(x)))


def fit(model, x=X, y=Y, **how):
    return model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, **how).history


def check(step, make=lambda model: None, optimizer=SGD, x=X, y=Y, **settings):
    def build():
        model = Own(step, make)
        model.build([None, X.shape[1]])
        model.compile(optimizer(), "mse")
        return model

    return check_twins(build, functools.partial(fit, x=x, y=y), **settings)


# ------------------------------------------------------- an optimizer's own methods


class Clipping(keras.optimizers.SGD):
    """Clips each gradient before Keras's ``apply_gradients`` gets it, as adaptive clipping does."""

    def apply_gradients(self, grads_and_vars):
        clipped = [(tf.clip_by_norm(g, 0.05), v) for g, v in grads_and_vars]
        return super().apply_gradients(clipped)


def clipped_by_function():
    optimizer = SGD()
    apply = optimizer.apply_gradients
    optimizer.apply_gradients = lambda pairs: apply(
        [(tf.clip_by_norm(g, 0.05), v) for g, v in pairs]
    )
    return optimizer


@pytest.mark.one_in(2)
@pytest.mark.parametrize("optimizer", [functools.partial(Clipping, 0.1), clipped_by_function])
@pytest.mark.parametrize("settings", [{}, {"shard": "optimizer"}], ids=str)
def test_an_optimizer_may_change_gradients_before_keras_gets_them(optimizer, settings):
    def build():
        model = keras.Sequential([keras.Input([3]), layers.Dense(4, "tanh"), layers.Dense(1)])
        model.compile(optimizer(), "mse")
        return model

    check_twins(build, fit, **settings)


# ------------------------------------------------------------- gradients in variables


def holds_sums(model):
    model.sums = [
        model.add_weight(shape=v.shape, initializer="zeros", trainable=False)
        for v in weights_of(model)
    ]


def applies_variables(model, x, y):
    loss, gradients = model.gradients(x, y)
    for total, gradient in zip(model.sums, gradients, strict=True):
        total.assign_add(gradient)
    model.optimizer.apply_gradients(zip(model.sums, weights_of(model), strict=True))
    for total in model.sums:
        total.assign(tf.zeros_like(total))
    return {"loss": loss}


def test_gradients_may_be_variables():
    check(applies_variables, holds_sums)


def test_gradients_may_be_variables_in_a_loop():
    def trained(strategy):
        with strategy.scope():
            weight = tf.Variable(tf.ones([3, 1]))
            total = tf.Variable(tf.zeros([3, 1]), trainable=False)
            optimizer = SGD()
            optimizer.build([weight])

        def add(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((x @ weight - y) ** 2) / BATCH
            total.assign_add(tape.gradient(loss, weight))

        def apply():
            optimizer.apply_gradients([(total, weight)])
            total.assign(tf.zeros_like(total))

        run_add = tf.function(lambda batch: strategy.run(add, args=batch))
        run_apply = tf.function(lambda: strategy.run(apply))
        batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
        for batch in strategy.experimental_distribute_dataset(batches):
            run_add(batch)
            run_apply()
        return weight.numpy()

    np.testing.assert_allclose(trained(two()), trained(tf.distribute.get_strategy()), atol=1e-6)


# --------------------------------------------------------------------- own sums


def sums_by_itself(model, x, y, loss_of, how, norm=None):
    loss, gradients = model.gradients(x, y, loss_of)
    gradients = tf.distribute.get_replica_context().all_reduce(how, gradients)
    if norm is not None:
        gradients, _ = tf.clip_by_global_norm(gradients, norm)
    model.optimizer.apply(gradients, weights_of(model))
    return {"loss": loss}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("norm", [None, 0.2])
@pytest.mark.parametrize("how", ["SUM", "MEAN"])
@pytest.mark.parametrize("loss_of", [Own.loss_of, mean_loss])
def test_a_step_may_apply_its_own_sums(loss_of, how, norm):
    check(functools.partial(sums_by_itself, loss_of=loss_of, how=how, norm=norm))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("norm", [None, 0.2])
@pytest.mark.parametrize("how", ["SUM", "MEAN"])
def test_a_loop_may_apply_its_own_sums(how, norm):
    """Each replica's loss is a part of the batch's for a sum, and its own for a mean."""

    def trained(strategy):
        rows = BATCH / (strategy.num_replicas_in_sync if how == "MEAN" else 1)
        with strategy.scope():
            weight, optimizer = tf.Variable(tf.ones([3, 1])), SGD()
            optimizer.build([weight])

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((x @ weight - y) ** 2) / rows
            gradients = tape.gradient(loss, [weight])
            gradients = tf.distribute.get_replica_context().all_reduce(how, gradients)
            if norm is not None:
                gradients, _ = tf.clip_by_global_norm(gradients, norm)
            optimizer.apply_gradients(zip(gradients, [weight], strict=True))

        run = tf.function(lambda batch: strategy.run(step, args=batch))
        batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH, drop_remainder=True)
        for batch in strategy.experimental_distribute_dataset(batches):
            run(batch)
        return weight.numpy()

    np.testing.assert_allclose(trained(two()), trained(tf.distribute.get_strategy()), atol=1e-6)


# ------------------------------------------------------------- what a tape differentiates


def several_losses(model, x, y):
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = model.compute_loss(x=x, y=y, y_pred=outputs)
        penalty = tf.reduce_mean(tf.square(outputs))
    model.optimizer.apply(tape.gradient([loss, penalty], weights_of(model)), weights_of(model))
    return {"loss": loss}


def recomputes(model, x, y):
    block = tf.recompute_grad(lambda x: model.first(x))
    loss, gradients = model.gradients(
        x, y, lambda *_: tf.reduce_mean(tf.square(y - model.second(block(x))))
    )
    model.optimizer.apply(gradients, weights_of(model))
    return {"loss": loss}


@tf.function
def adds_up_in_a_loop(model, x, y):
    for i in tf.range(2):
        _, gradients = model.gradients(x[i::2], y[i::2])
        for total, gradient in zip(model.sums, gradients, strict=True):
            total.assign_add(gradient / 2)
    model.optimizer.apply([tf.convert_to_tensor(v) for v in model.sums], weights_of(model))
    for total in model.sums:
        total.assign(tf.zeros_like(total))
    return {"n": tf.constant(1.0)}


@tf.function
def loops_in_a_function(model, x, y):
    """Keras converts no code, so that only a function makes this loop one of the graph."""
    total = 0.0
    for i in tf.range(3):
        total += tf.cast(i, tf.float32) / 3
    loss, gradients = model.gradients(x, y)
    model.optimizer.apply([total * g for g in gradients], weights_of(model))
    return {"loss": loss}


@pytest.mark.parametrize("step", [several_losses, recomputes, loops_in_a_function])
def test_a_tape_may_differentiate(step):
    check(step)


def test_a_loop_of_tensorflow_may_add_up_gradients_in_variables():
    """All batches have rows for both replicas and both microbatches."""
    check(adds_up_in_a_loop, holds_sums, x=X[: 2 * BATCH], y=Y[: 2 * BATCH])


def test_a_mean_over_the_values_of_a_sparse_batch():
    """Replicas hold different numbers of values, in as many rows."""
    dense = X * (np.random.default_rng(2).random(X.shape) < np.linspace(0.1, 1, len(X))[:, None])
    places = np.argwhere(dense)
    sparse = tf.SparseTensor(places, dense[tuple(places.T)], dense.shape)
    batches = tf.data.Dataset.from_tensor_slices(sparse).batch(BATCH)

    class Ratings(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)
            self.dense.build([None, 3])
            self.built = True

        def train_step(self, rated):
            weights = self.dense.trainable_variables
            with tf.GradientTape() as tape:
                found = tf.gather_nd(self.dense(tf.sparse.to_dense(rated)), rated.indices)
                loss = tf.reduce_mean(tf.square(found - rated.values))
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    def build():
        model = Ratings()
        model.compile(SGD())
        return model

    check_twins(build, lambda model: model.fit(batches, epochs=2, verbose=0).history)


# ----------------------------------------------------------------- replicas agree


def keeps_codes(model):
    model.moving = model.add_weight(shape=[3], initializer="zeros", trainable=False)
    model.codes = model.add_weight(shape=[3], initializer="zeros")


def codes_follow_a_statistic(model, x, y):
    """A weight gets what a statistic of the batch has become, as a codebook does."""
    loss, gradients = model.gradients(x, y)
    model.optimizer.apply(gradients, weights_of(model))
    model.moving.assign(0.9 * model.moving + 0.1 * tf.reduce_mean(x, 0))
    model.codes.assign(2 * model.moving)
    return {"loss": loss}


def keeps_a_mean(model):
    model.mean = model.add_weight(shape=[], initializer="zeros", trainable=False)


def mean_follows_the_loss(model, x, y):
    loss, gradients = model.gradients(x, y)
    model.mean.assign(0.9 * model.mean + 0.1 * loss)
    model.optimizer.apply([g / (1 + model.mean) for g in gradients], weights_of(model))
    return {"loss": loss, "mean": model.mean}


def keeps_what_differs_in_a_branch(model, x, y):
    """Each replica compares its own part, so that some may take the branch alone."""
    loss, gradients = model.gradients(x, y)
    model.optimizer.apply(gradients, weights_of(model))
    tf.cond(
        tf.reduce_mean(x) > 0,
        lambda: model.mean.assign(0.9 * model.mean + 0.1 * loss),
        lambda: model.mean.value,
    )
    return {"loss": loss}


def rate_follows_the_loss(model, x, y):
    """Polyak's step, by a loss that is the replica's part of the batch's."""
    loss, gradients = model.gradients(x, y)
    model.optimizer.learning_rate.assign(0.1 * tf.minimum(1.0, 0.1 * loss))
    model.optimizer.apply(gradients, weights_of(model))
    return {"loss": loss}


def rate_follows_the_batch(model, x, y):
    loss, gradients = model.gradients(x, y)
    model.optimizer.learning_rate.assign(0.1 + 0.01 * tf.reduce_mean(x))
    model.optimizer.apply(gradients, weights_of(model))
    return {"loss": loss}


@pytest.mark.parametrize(
    ("step", "make"),
    [
        (codes_follow_a_statistic, keeps_codes),
        (mean_follows_the_loss, keeps_a_mean),
        (rate_follows_the_loss, lambda model: None),
        (rate_follows_the_batch, lambda model: None),
    ],
)
def test_replicas_agree_on_what_depends_on_the_batch(step, make):
    """Only the first replica's weights are compared with one device's, so look at both."""
    models = []

    def noting(model, x, y):
        models.append(model)
        return step(model, x, y)

    check(noting, make)
    for variable in models[-1].variables:
        first, *others = variable.value.values
        assert all(np.array_equal(first, other) for other in others), variable.path


def test_replicas_that_take_a_branch_alone_agree_afterwards():
    keras.utils.set_random_seed(1)
    with two(deadline=30).scope():
        model = Own(keeps_what_differs_in_a_branch, keeps_a_mean)
        model.build([None, 3])
        model.compile(SGD(), "mse")
    fit(model)
    first, other = model.mean.value.values
    assert np.array_equal(first, other) and first > 0


def test_a_norm_of_summed_gradients_in_batches_of_known_size():
    """A weight has as many numbers as a multiple of a replica's rows, and is no batch."""

    def norm_in_logs(model, x, y):
        _, gradients = model.gradients(x, y)
        model.optimizer.apply(gradients, weights_of(model))
        return {"norm": tf.sqrt(tf.add_n([tf.reduce_sum(g * g) for g in gradients]))}

    batches = tf.data.Dataset.from_tensor_slices((np.tile(X[:, :1], 4), Y))
    batches = batches.batch(BATCH, drop_remainder=True)  # 8 rows of a replica, 16 numbers

    def build():
        model = Own(norm_in_logs)
        model.build([None, 4])
        model.compile(SGD(), "mse")
        return model

    check_twins(build, lambda model: model.fit(batches, verbose=0).history)


def adds_noise(model, x, y):
    """Noise in gradients, and in weights: its deviation must not become smaller by replicas."""
    loss, gradients = model.gradients(x, y)
    noise = [0 * g + tf.random.normal(g.shape) for g in gradients]
    model.optimizer.apply(noise, weights_of(model))
    for weight in weights_of(model):
        weight.assign_add(0.1 * tf.random.normal(weight.shape))
    return {"loss": loss}


def test_replicas_add_the_noise_of_one_of_them():
    keras.utils.set_random_seed(1)
    with two().scope():
        model = Own(adds_noise)
        model.build([None, 3])
        model.compile(keras.optimizers.SGD(1.0), "mse")
    before = model.get_weights()
    fit(model)  # six steps
    moves = np.concatenate(
        [(new - old).ravel() for new, old in zip(model.get_weights(), before, strict=True)]
    )
    np.testing.assert_allclose(moves.std(), np.sqrt(6 * 1.01), rtol=0.25)  # a mean: 0.71 times
    for variable in model.trainable_variables:
        first, other = variable.value.values
        assert np.array_equal(first, other)
