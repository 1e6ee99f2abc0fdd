"""Losses by every way that a Keras program can reach, compute or log one: as on one device.

Each program trains on two replicas in batches of 16, 16 and 7 rows, with masks and weights that
fall unevenly on the replicas. So what a replica's loss divides by is never the same on both.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.covering import grid, singles
from tests.strategy.strangers import (
    BATCH,
    GLOBAL,
    HELD,
    LABELS,
    MSE,
    SEQUENCES,
    Adds,
    Logs,
    Tagger,
    Tracked,
    X,
    Y,
    distiller,
    masked,
    of_sparse_rows,
    sparse_rows,
)
from tests.strategy.twins import check_twins, two


def fit(model, x=X, y=Y, **how):
    return model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, **how).history


def check(build, x=X, y=Y, optimizer=None, tolerance=1e-6, **strategy):
    """Weights and logs are those of one device."""

    def compiled():
        model = build()
        model.compile((optimizer or functools.partial(keras.optimizers.SGD, 0.1))())
        return model

    return check_twins(compiled, functools.partial(fit, x=x, y=y), tolerance, **strategy)


def some(names, like_another):
    """Return all names; those that are like another one are for full runs."""
    marks = {name: [pytest.mark.full] if name in like_another else [] for name in names}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


# -------------------------------------------------- loss objects, wherever they are


class Holder:
    """No layer: Keras does not look for losses in it."""

    def __init__(self):
        self.loss = masked()


IN_CLOSURE = masked()
REACHED = {
    "a global": lambda model, y, p: GLOBAL(y, p),
    "in a dict": lambda model, y, p: HELD["words"](y, p),
    "in a list": lambda model, y, p: HELD["list"][0](y, p),
    "made in the step": lambda model, y, p: masked()(y, p),
    "in a closure": functools.partial(lambda loss, model, y, p: loss(y, p), IN_CLOSURE),
    "in another object": functools.partial(lambda held, model, y, p: held.loss(y, p), Holder()),
    "twice": lambda model, y, p: GLOBAL(y, p) + 0.5 * masked()(y, p),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("reached", some(REACHED, {"in a dict", "in a list", "in another object"}))
def test_a_masked_loss_object_is_exact_wherever_it_is(reached, caplog):
    check(lambda: Tagger(REACHED[reached]), SEQUENCES, LABELS)
    assert "own_losses" not in caplog.text


def test_a_masked_loss_object_is_exact_eagerly():
    def build():
        model = Tagger(REACHED["a global"])
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
        return model

    check_twins(build, functools.partial(fit, x=SEQUENCES, y=LABELS))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("reduction", ["sum", "mean", "mean_with_sample_weight"])
def test_each_reduction_in_a_step(reduction, caplog):
    weights = np.arange(1, 1 + BATCH, dtype=np.float32)

    def loss_of(model, y, p):
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        return 0.01 * loss(y, p, sample_weight=tf.abs(y[:, 0]) + weights[0])

    check(lambda: Tagger(loss_of, 1))
    assert "own_losses" not in caplog.text


# ------------------------------------------------------------- terms of a user's own


def mean_squares(y, p):
    return tf.reduce_mean(tf.square(y - p))


def mean_of_squares(model, y, p):
    return mean_squares(y, p)


def mean_of_words(y, p):
    """Return the mean over words as the tutorials of translation compute it."""
    each = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
    mask = tf.cast(y != 0, each.dtype)
    return tf.reduce_sum(each * mask) / tf.reduce_sum(mask)


def kept(y, above=0.5):
    return tf.cast(y > above, tf.float32)


def sum_and_ratio(model, y, p):
    total = tf.reduce_sum(tf.abs(p) * kept(y))
    return total / tf.reduce_sum(kept(y)) + 0.01 * total


def dice(model, y, p):
    """Return a loss whose divisor depends on weights, too."""
    mask, p = kept(y), tf.sigmoid(p)
    return 1 - (2 * tf.reduce_sum(mask * p) + 1) / (tf.reduce_sum(mask) + tf.reduce_sum(p) + 1)


def masked_columns(model, y, p):
    columns = tf.concat([y, 2 * y - 1], axis=1)
    sums = tf.reduce_sum(tf.abs(p - columns) * kept(columns), axis=0)
    return tf.reduce_mean(sums / tf.reduce_sum(kept(columns), axis=0))


def stopped(model, y, p):
    ratio = tf.reduce_sum(tf.abs(p) * kept(y)) / tf.reduce_sum(kept(y))
    return MSE(y, p) + ratio - 0.5 * tf.stop_gradient(ratio + MSE(y, p))


@tf.function
def in_a_function(y, p):
    return MSE(y, p)


def finite(loss):
    return tf.where(tf.math.is_finite(loss), loss, 0.0)


def hundreds(squares):
    total = tf.reduce_sum(squares)
    return sum(total * (1e-5 + i * 1e-8) for i in range(300))


TERMS = {
    "a loss object in a function": lambda model, y, p: in_a_function(y, p),
    "a loss object in a function, and a mean": lambda model, y, p: (
        in_a_function(y, p) + 0.3 * tf.reduce_mean(tf.abs(p))
    ),
    "a loss object in a branch": lambda model, y, p: (
        tf.cond(tf.reduce_any(y > 0.5), lambda: MSE(y, p), lambda: 0.0)
        + 0.3 * tf.reduce_mean(tf.abs(p))
    ),
    "in a row, and checked": lambda model, y, p: tf.debugging.check_numerics(
        tf.reduce_sum(tf.concat([[finite(MSE(y, p))], [mean_squares(y, p)]], 0)), "loss"
    ),
    "of transposed": lambda model, y, p: tf.reduce_mean(
        tf.reduce_sum(0.01 * tf.transpose(tf.square(p - y * [[1.0, 2.0]])), axis=1)
    ),
    "a sum, also in a ratio": sum_and_ratio,
    "a Dice loss": dice,
    "a masked mean of each column": masked_columns,
    "a number without a gradient": stopped,
    "hundreds in a row": lambda model, y, p: hundreds(tf.square(y - p)),
    "a mean by a mean and a little": lambda model, y, p: (
        tf.reduce_mean(tf.abs(p) * kept(y)) / (tf.reduce_mean(kept(y)) + 1e-3)
    ),
    "a mean beside a loss object": lambda model, y, p: MSE(y, p) + 0.3 * tf.reduce_mean(tf.abs(p)),
    "a mean of Keras's ops": lambda model, y, p: MSE(y, p) + 0.3 * ops.mean(ops.abs(p)),
    "a sum beside a loss object": lambda model, y, p: MSE(y, p) + 0.01 * tf.reduce_sum(p),
    "a penalty on weights": lambda model, y, p: (
        MSE(y, p) + 0.1 * tf.reduce_sum(tf.square(model.dense.kernel))
    ),
    "a penalty alone with a mean": lambda model, y, p: (
        mean_squares(y, p) + 0.1 * tf.reduce_sum(tf.square(model.dense.kernel))
    ),
    "a mean of sums": lambda model, y, p: (
        tf.reduce_mean(tf.reduce_sum(tf.square(y - p), axis=1)) - MSE(y, p)
    ),
    "a sum of means": lambda model, y, p: (
        MSE(y, p) + tf.reduce_sum(tf.reduce_mean(tf.square(y - p), axis=0))
    ),
    "stacked": lambda model, y, p: ops.sum(ops.stack([MSE(y, p), mean_squares(y, p)])),
    "the mean of two": lambda model, y, p: tf.reduce_mean([MSE(y, p), mean_squares(y, p)]),
    "subtracted": lambda model, y, p: 2.0 * MSE(y, p) - 0.2 * tf.reduce_mean(tf.abs(p)),
    "divided by rows": lambda model, y, p: (
        MSE(y, p) + tf.reduce_sum(tf.abs(p)) / tf.cast(tf.shape(p)[0], tf.float32)
    ),
    "divided by rows before the sum": lambda model, y, p: tf.reduce_sum(
        2.0 * tf.square(y - p)[:, 0] / tf.cast(tf.shape(p)[0], tf.float32)
    ),
    "weights that add up to one": lambda model, y, p: tf.reduce_sum(
        -tf.square(y - p) * -(tf.exp(y) / tf.reduce_sum(tf.exp(y)))
    ),
    "weights that are all zero": lambda model, y, p: (
        MSE(y, p)
        + tf.reduce_sum(
            tf.abs(p) * tf.math.divide_no_nan(kept(y, 100), tf.reduce_sum(kept(y, 100)))
        )
    ),
    "rows along the last axis": lambda model, y, p: (
        tf.reduce_sum(transposed := tf.transpose(tf.square(y - p * [[1.0, 0.5]])))
        / tf.cast(tf.shape(transposed)[1], tf.float32)
    ),
    "rows beside the axis that divides": lambda model, y, p: (
        0.01
        * tf.reduce_sum(transposed := tf.transpose(tf.square(y - p * [[1.0, 0.5]])))
        / tf.cast(tf.shape(transposed)[0], tf.float32)
    ),
    "divided by kept ones": lambda model, y, p: (
        MSE(y, p)
        + tf.math.divide_no_nan(
            tf.reduce_sum(tf.abs(p) * tf.cast(y > 0.5, p.dtype)),
            tf.reduce_sum(tf.cast(y > 0.5, p.dtype)),
        )
    ),
    "divided by at least one": lambda model, y, p: (
        MSE(y, p)
        + tf.reduce_sum(tf.abs(p) * tf.cast(y > 3.0, p.dtype))
        / tf.maximum(tf.reduce_sum(tf.cast(y > 3.0, p.dtype)), 1.0)
    ),
    "a mean by a mean": lambda model, y, p: (
        MSE(y, p)
        + tf.reduce_mean(tf.abs(p) * tf.cast(y > 0.5, p.dtype))
        / tf.reduce_mean(tf.cast(y > 0.5, p.dtype))
    ),
    "chosen rows": lambda model, y, p: (
        MSE(y, p) + 0.2 * tf.reduce_mean(tf.square(tf.boolean_mask(p, y > 0.5)))
    ),
    "some rows": lambda model, y, p: MSE(y, p) + 0.2 * tf.reduce_mean(tf.square(p[3:])),
    "only a masked mean": lambda model, y, p: (
        tf.reduce_sum(tf.abs(p) * tf.cast(y > 0.5, p.dtype))
        / tf.reduce_sum(tf.cast(y > 0.5, p.dtype))
    ),
    "only a sum": lambda model, y, p: 0.02 * tf.reduce_sum(tf.square(y - p)),
    "of the global batch": lambda model, y, p: (
        MSE(y, p) + tf.nn.compute_average_loss(tf.square(y - p)[:, 0], global_batch_size=BATCH)
    ),
    "a weight that is trained": lambda model, y, p: (
        MSE(y, p) + 0.1 * tf.reduce_sum(model.dense.bias) * tf.reduce_mean(tf.abs(y - p))
    ),
}
BY_REPLICA = {"some rows": "each replica leaves its own first rows out"}
LIKE_ANOTHER = {
    *("a loss object in a function", "a mean of Keras's ops", "a penalty alone with a mean"),
    *("a mean by a mean", "only a masked mean", "only a sum", "divided by rows"),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("term", some(sorted(TERMS.keys() - BY_REPLICA.keys()), LIKE_ANOTHER))
def test_each_term_goes_by_what_it_divides_by(term, caplog):
    check(lambda: Tagger(TERMS[term], 1))
    assert "own_losses" not in caplog.text


HIDDEN = "of transposed"  # a known size does not tell along which axis the rows lie


@pytest.mark.one_in(8)
@pytest.mark.parametrize("term", sorted(TERMS.keys() - BY_REPLICA.keys() - {HIDDEN}))
def test_batches_of_a_size_that_the_graph_knows(term, caplog):
    """Keras gives such batches if their size divides the number of rows."""
    check(lambda: Tagger(TERMS[term], 1), X[: 2 * BATCH], Y[: 2 * BATCH])
    assert "own_losses" not in caplog.text


def test_rows_that_a_transposition_hides_are_asked_for(caplog):
    with two().scope():
        model = Tagger(TERMS[HIDDEN], 1)
        model.compile(keras.optimizers.SGD(0.1))
    model.fit(X[:32], Y[:32], BATCH, verbose=0)
    assert "own_losses" in caplog.text


@pytest.mark.slow
def test_a_masked_mean_of_words(caplog):
    check(lambda: Tagger(lambda model, y, p: mean_of_words(y, p)), SEQUENCES, LABELS)
    assert "own_losses" not in caplog.text


def in_steps(shape):
    """Return divisors from a shape: the steps of time of a batch, of all rows, of each row."""
    steps, all_steps = tf.cast(shape[1], tf.float32), tf.cast(shape[0] * shape[1], tf.float32)
    others = tf.cast(tf.reduce_prod(shape[1:]), tf.float32)
    return {"steps": 100 * steps, "all steps": all_steps, "of each row": 100 * others}


@pytest.mark.slow
@pytest.mark.parametrize("divisor", ["steps", "all steps", "of each row"])
def test_a_sum_by_sizes_of_the_batch(divisor, caplog):
    def loss_of(model, y, p):
        return tf.reduce_sum(tf.square(y - p)) / in_steps(tf.shape(p))[divisor]

    check(lambda: Tagger(loss_of, 1), SEQUENCES, LABELS[..., None].astype(np.float32))
    assert "own_losses" not in caplog.text


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["Dice", "Tversky"])
def test_losses_of_keras_that_give_one_number(name, caplog):
    def build():
        outputs = layers.Dense(1, activation="sigmoid")
        model = keras.Sequential([keras.Input([3]), outputs])
        model.compile(keras.optimizers.SGD(0.1), getattr(keras.losses, name)())
        return model

    check_twins(build, functools.partial(fit, y=(Y > 0.5).astype(np.float32)))
    assert "one number" not in caplog.text


@pytest.mark.slow
def test_a_mean_of_more_elements_than_float16_can_count():
    def loss_of(model, y, p):
        many = tf.cast(tf.tile(p, [1, 9000]), tf.float16)
        return tf.cast(tf.reduce_mean(tf.boolean_mask(many, y[:, 0] > -9)), tf.float32)

    check(lambda: Tagger(loss_of, 1), tolerance=1e-3)


# ------------------------------------------------------- functions of sums and means


def focal(model, y, p):
    error = MSE(y, p)
    return 0.25 * (1 - tf.exp(-error)) ** 2 * error


def root(model, y, p):
    return MSE(y, p) + tf.sqrt(tf.reduce_mean(tf.square(y - p)))


def floods(model, y, p):
    """Keeps the loss above a bound: "Do we need zero training loss after achieving zero training
    error?" (Ishida et al., 2020).
    """
    return tf.abs(MSE(y, p) - 5) + 5


def of_columns(model, y, p):
    return tf.reduce_mean(tf.sqrt(tf.reduce_mean(tf.square(y - p), axis=0)))


def with_a_weight(model, y, p):
    return tf.math.log(tf.reduce_sum(tf.square(y - p)) + tf.reduce_sum(model.dense.kernel**2))


def of_a_ratio(model, y, p):
    mask = tf.cast(y > 0, tf.float32)
    return tf.exp(tf.reduce_sum(mask * tf.square(y - p)) / tf.reduce_sum(mask) / 9)


def of_a_branch(model, y, p):
    error = MSE(y, p)
    return tf.where(error < 4, 0.5 * error**2, 4 * error - 8)


def product(model, y, p):
    return MSE(y, p) * tf.reduce_mean(tf.abs(p))


FUNCTIONS = (focal, root, floods, of_columns, with_a_weight, of_a_ratio, of_a_branch, product)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("loss_of", FUNCTIONS)
@pytest.mark.parametrize("classes", [1, 3])
def test_a_function_of_sums_over_the_batch(loss_of, classes, caplog):
    class Functional(Tagger):
        def logs(self, x, loss):
            return {"minimized": loss, "perplexity": tf.exp(loss / 10), "root": loss**0.5}

    check(lambda: Functional(loss_of, classes))
    assert "own_losses" not in caplog.text


@pytest.mark.one_in(3)
@pytest.mark.parametrize("loss_of", [focal, root, of_columns])
def test_a_function_is_a_loss_of_compile(loss_of, caplog):
    def build():
        model = keras.Sequential([keras.Input([3]), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), lambda y, p: loss_of(model, y, p))
        return model

    check_twins(build, fit)
    assert "one number" not in caplog.text


class Best(keras.Model):
    """Keeps the least loss of all batches, which is infinite at first, and logs odd numbers."""

    def __init__(self, least):
        super().__init__()
        self.dense, self.least = layers.Dense(1), least
        infinite = keras.initializers.Constant(np.inf)
        self.best = self.add_weight(shape=[], initializer=infinite, trainable=False)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = MSE(y, self(x, training=True))
        weights = self.dense.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply(gradients, weights)
        self.best.assign(self.least(loss, self.best))
        return {"best": self.best, "root": tf.sqrt(0 * loss), "log": tf.math.log(0 * loss + 1e-30)}


@pytest.mark.parametrize(
    "least",
    [
        tf.minimum,
        lambda loss, best: tf.where(loss < best, loss, best),
        pytest.param(
            lambda loss, best: tf.where(tf.math.is_finite(loss), tf.minimum(loss, best), best),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_variable_keeps_a_function_of_losses(least):
    def build():
        model = Best(least)
        model.build([None, 3])
        model.compile(keras.optimizers.SGD(0.1))
        return model

    check_twins(build, fit)


class Invariant(Tagger):
    """Adds the squared gradient by a scale: "Invariant Risk Minimization" (Arjovsky et al., 2019).

    The gradient is not that of the whole batch, and a warning says so.
    """

    @staticmethod
    def penalized(model, y, p):
        scale = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(scale)
            error = tf.reduce_mean(tf.square(y - p * scale))
        return error + tape.gradient(error, scale) ** 2


def test_a_gradient_is_no_sum_over_samples(caplog):
    found = []

    def kept(model):
        found.append(fit(model))
        return {}

    with pytest.raises(AssertionError):
        check_twins(lambda: compiled_invariant(), kept)
    expected, other = (each["minimized"][0] for each in found)
    assert abs(other / expected - 1) < 0.5  # the square of a sum of gradients: four times as much
    assert "'own' (Invariant)" in caplog.text


def compiled_invariant():
    model = Invariant(Invariant.penalized, 1)
    model.compile(keras.optimizers.SGD(0.001))
    return model


def test_a_function_beside_the_loss_of_each_sample():
    """The function is of the replica's samples then, as before; all of the loss is a sum."""

    def partition(model, y, p):
        return tf.reduce_sum(tf.square(y - p) - 0 * tf.math.log(tf.reduce_mean(tf.exp(p)))) / 64

    check(lambda: Tagger(partition, 1))


def test_a_deviation_from_the_mean_is_no_function_of_sums(caplog):
    """Each replica knows its own mean only, so that the term is not known."""

    def deviation(model, y, p):
        return MSE(y, p) + tf.sqrt(tf.reduce_mean(tf.square(p - tf.reduce_mean(p))))

    class Deviating(Tagger):
        pass

    with pytest.raises(AssertionError):
        check(lambda: Deviating(deviation, 1))
    assert "'own' (Deviating)" in caplog.text


class Harmonic(keras.Model):
    """Logs a number that it computes from results of metrics, as the F1 score."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1, activation="sigmoid")

    def call(self, x):
        return self.dense(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        both = found["precision"] + found["recall"]
        return found | {"f1": 2 * found["precision"] * found["recall"] / (both + 1e-7)}


def test_a_log_that_is_computed_from_results_of_metrics():
    positive = (Y > 0).astype(np.float32)

    def build():
        model = Harmonic()
        metrics = [keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall")]
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=metrics)
        return model

    check_twins(build, functools.partial(fit, y=positive, validation_data=(X[:20], positive[:20])))


def test_a_term_that_cannot_be_seen_is_named(caplog):
    def largest(model, y, p):
        return MSE(y, p) + tf.reduce_max(tf.square(y - p))

    class Unseen(Tagger):
        pass

    with pytest.raises(AssertionError):
        check(lambda: Unseen(largest, 1))
    assert "'own' (Unseen)" in caplog.text
    assert "Max" in caplog.text


def test_a_tape_that_another_one_records_is_left_alone():
    """A gradient penalty of keras.io: its inner gradient is of rows, and no loss."""

    def penalty(model, y, p):
        x = y * tf.ones([1, 3])
        with tf.GradientTape() as inner:
            inner.watch(x)
            predicted = tf.reduce_sum(tf.square(model(x, training=True)))
        norms = tf.sqrt(tf.reduce_sum(tf.square(inner.gradient(predicted, x)), axis=1))
        return MSE(y, p) + 0.1 * tf.reduce_mean(tf.square(norms - 1.0))

    check(lambda: Tagger(penalty, 1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("beside", [False, True])
def test_a_mean_of_ones_own_by_inputs(beside):
    """Adversarial samples: the gradient by inputs is a part of that of the batch's mean."""

    class Climbs(Tagger):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            found = tape.gradient(loss, [x, self.trainable_variables] if beside else [x])
            if not beside:
                return super().train_step((x + 20.0 * found[0], y))
            self.optimizer.apply(found[1], self.trainable_variables)
            return {"slope": tf.reduce_sum(tf.square(found[0]))}

    check(lambda: Climbs(mean_of_squares, 1))


class Function(Tagger):
    """Model whose tape is within a function of its own."""

    @tf.function
    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, y, self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, data):
        loss, gradients = self.gradients(*data)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"minimized": loss}


class Decorated(Tagger):
    @tf.function
    def train_step(self, data):
        return Tagger.train_step(self, data)


@pytest.mark.one_in(4)
@grid(
    "kind, term",
    [Function, Decorated],
    ["a mean beside a loss object", "only a masked mean", "only a sum", "divided by rows"],
    aspects=singles,
)
def test_steps_in_functions(kind, term):
    check(lambda: kind(TERMS[term], 1))


class Vector(Tagger):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.square(y - self(x))
        weights = self.trainable_variables
        gradients = tape.gradient(errors, weights, output_gradients=0.01 * tf.ones_like(errors))
        self.optimizer.apply_gradients(zip(gradients, weights))
        return {"minimized": tf.reduce_mean(errors)}


def test_gradients_that_are_given_to_a_tape():
    check(lambda: Vector(None, 1))


class Within(Tagger):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.loss_of(self, y, self(x))
            gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"minimized": loss}


@pytest.mark.slow
def test_a_tape_that_is_asked_while_it_records():
    check(lambda: Within(TERMS["a mean beside a loss object"], 1))


def test_a_tape_used_twice_says_what_tensorflow_says():
    class Twice(Tagger):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = MSE(data[1], self(data[0]))
            tape.gradient(loss, self.trainable_variables)
            return tape.gradient(loss, self.trainable_variables)

    with pytest.raises(RuntimeError, match="non-persistent GradientTape"):
        check(lambda: Twice(None, 1))


# -------------------------------------------------------- what Keras itself offers


ADDED = {
    "a sum": lambda x: 0.01 * ops.sum(ops.square(x)),
    "a mean": lambda x: ops.mean(ops.abs(x)),
    "a vector": lambda x: 0.01 * ops.sum(ops.square(x), axis=-1),
    "a masked mean": lambda x: (
        ops.sum(ops.abs(x) * ops.cast(x > 0, "float32")) / ops.sum(ops.cast(x > 0, "float32"))
    ),
    "a constant": lambda x: ops.convert_to_tensor(0.5),
}


@pytest.mark.parametrize(
    "added", [pytest.param(n, marks=[] if n == "a sum" else pytest.mark.slow) for n in ADDED]
)
def test_what_a_layer_adds(added):
    def build():
        inputs = keras.Input([3])
        model = keras.Model(inputs, Adds(ADDED[added])(layers.Dense(1)(inputs)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    check_twins(build, fit)


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [False, pytest.param(True, marks=pytest.mark.full)])
def test_distillation(by_name):
    check_twins(functools.partial(distiller, by_name), functools.partial(fit, y=LABELS[:, :1] % 4))


class Whole(keras.losses.Loss):
    """A loss object that reduces by itself, and so passes by Keras's own reduction."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        kept = ops.cast(y_true > 0.5, "float32")
        return ops.sum(ops.abs(y_true - y_pred) * kept) / ops.sum(kept)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("regularizer", [None, "l2"])
def test_a_loss_object_that_reduces_by_itself(regularizer):
    def build():
        dense = layers.Dense(1, kernel_regularizer=regularizer)
        model = keras.Sequential([keras.Input([3]), dense])
        model.compile(keras.optimizers.SGD(0.05), Whole())
        return model

    check_twins(build, fit)


class Accumulates(Tagger):
    """Adds up the gradients of two steps in variables of its own, as before Keras 3."""

    def build(self, shape):
        super().build(shape)
        self.dense.build(shape)
        self.steps = self.add_weight(shape=[], dtype="int32", trainable=False)
        self.sums = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False)
            for v in self.dense.trainable_variables
        ]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, y, self(x, training=True))
        for kept, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables)):
            kept.assign_add(gradient)
        self.steps.assign_add(1)
        tf.cond(tf.equal(self.steps % 2, 0), self.move, tf.no_op)
        return {"loss": loss}

    def move(self):
        sums = [tf.convert_to_tensor(kept) for kept in self.sums]
        self.optimizer.apply_gradients(zip(sums, self.trainable_variables))
        for kept in self.sums:
            kept.assign(tf.zeros_like(kept))
        return tf.no_op()


EVEN = {"x": X[:32], "y": Y[:32]}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("own_losses", [None, "mean"])
def test_a_mean_whose_gradients_a_step_adds_up_in_variables(own_losses):
    check(lambda: Accumulates(mean_of_squares, 1), **EVEN, own_losses=own_losses)


def scaled_mean(model, y, p):
    return mean_of_squares(model, y, p) / tf.distribute.get_strategy().num_replicas_in_sync


@pytest.mark.one_in(2)
@pytest.mark.parametrize("own_losses", ["sum", "scaled"])
def test_variables_hold_sums_also_where_replicas_add_up_what_they_apply(own_losses):
    check(lambda: Accumulates(scaled_mean, 1), **EVEN, own_losses=own_losses)


class AppliesFirst(Accumulates):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        tf.cond(tf.equal(self.steps % 2, 0), self.move, tf.no_op)
        for kept, gradient in zip(self.sums, gradients):
            kept.assign_add(gradient)
        self.steps.assign_add(1)
        return {"loss": loss}


def test_a_step_may_apply_before_it_adds_up():
    check(lambda: AppliesFirst(scaled_mean, 1), **EVEN)
    with pytest.raises(ValueError, match="add up first, and then apply"):
        check(lambda: AppliesFirst(scaled_mean, 1), **EVEN, own_losses="scaled")


class AddsUpClippedRows(Accumulates):
    """A loop adds up the clipped gradients of single rows, as in training with privacy."""

    def train_step(self, data):
        x, y = data
        self(x)  # makes the variables
        rows = tf.shape(x)[0]

        def add(i):
            with tf.GradientTape() as tape:
                loss = mean_of_squares(self, y[i : i + 1], self(x[i : i + 1], training=True))
            clipped, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
            for kept, gradient in zip(self.sums, clipped):
                kept.assign_add(gradient)
            return [i + 1]

        tf.while_loop(lambda i: i < rows, add, [0])
        means = [kept / tf.cast(rows, kept.dtype) for kept in self.sums]
        self.optimizer.apply_gradients(zip(means, self.trainable_variables))
        for kept in self.sums:
            kept.assign(tf.zeros_like(kept))
        return {"rows": tf.constant(1.0)}


def test_a_loop_adds_up_clipped_gradients_of_rows():
    check(lambda: AddsUpClippedRows(None, 1), **EVEN)


def test_a_loss_function_that_gives_one_number(caplog):
    def masked_mean(y, p):
        kept = ops.cast(y > 0.5, "float32")
        return ops.sum(ops.abs(y - p) * kept) / ops.sum(kept)

    def build():
        model = keras.Sequential([keras.Input([3]), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), masked_mean)
        return model

    check_twins(build, fit)
    assert "one number" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_step", "my_step"])
def test_a_step_that_is_assigned(name):
    """Keras calls whatever ``model.train_step`` is."""

    def build():
        model = Tagger(TERMS["a mean beside a loss object"], 1)
        model.compile(keras.optimizers.SGD(0.05))
        if name == "train_step":
            step = model.train_step
            model.train_step = lambda data: step(data)
        else:
            type(model).my_step = lambda self, data: Tagger.train_step(self, data)
            model.train_step = model.my_step
        return model

    check_twins(build, fit)


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_loss_that_is_assigned(eagerly):
    """A function on a model is the user's own loss, as a method of a class is."""

    def build():
        model = keras.Sequential([keras.Input([3]), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=eagerly)
        model.compute_loss = lambda x=None, y=None, y_pred=None, sample_weight=None, **_: (
            tf.reduce_mean(tf.square(y - y_pred))
        )
        return model

    check_twins(build, fit)


# ------------------------------------------------------------------- logs and metrics


def plain(**how):
    def build():
        model = keras.Sequential([keras.Input([3]), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", **how)
        return model

    return build


def with_validation(model):
    return fit(model, validation_data=(X[:9], Y[:9]), validation_batch_size=4)


def one_number(y, p):
    return ops.sqrt(ops.mean(ops.square(y - p)))


def mean_number(y, p):
    return ops.mean(ops.abs(y - p))


def test_a_metric_function_that_gives_one_number():
    check_twins(plain(metrics=[mean_number]), with_validation)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["seen", "another"])
def test_a_compute_metrics_that_adds_keys(key):
    def build():
        model = Logs(key)
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        return model

    check_twins(build, with_validation)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "term", ["a mean beside a loss object", "only a masked mean", "a penalty on weights"]
)
def test_metrics_of_a_steps_own_loss(term):
    check(lambda: Tracked(TERMS[term]))


class Listed(keras.Model):
    """A step of Keras's guides: its logs hold the metrics of ``compile`` in a dict of their own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for metric in self.metrics:
            metric.update_state(*([loss] if metric.name == "loss" else [y, predicted]))
        return {metric.name: metric.result() for metric in self.metrics}


@pytest.mark.slow
def test_logs_that_list_the_metrics_of_the_model():
    def build():
        inputs = keras.Input([3])
        model = Listed(inputs, layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae", "mape"])
        return model

    assert "mape" in check_twins(build, fit)


class Counts(Tracked):
    """Sums and means of numbers that all replicas have."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.sum.update_state(1)
        self.sum.update_state(self.optimizer.learning_rate)
        self.mean.update_state(self.optimizer.learning_rate)
        self.weighted.update_state(0.5)
        return logs | {metric.name: metric.result() for metric in self.metrics}


@pytest.mark.slow
def test_metrics_of_numbers_that_all_replicas_have():
    check(lambda: Counts(lambda model, y, p: MSE(y, p)))


class CountsRows(Tracked):
    """Whole numbers of a batch, as how many predictions are right, told to metrics and to logs."""

    def logs(self, x, loss):
        near = tf.reduce_sum(tf.cast(x[:, 0] > 0, tf.int32))
        rows, words = tf.shape(x)[0], tf.size(x)
        for metric, number in zip(self.metrics, (near, rows, near), strict=True):
            metric.update_state(number)
        self.sum.update_state(tf.cast(near, tf.float32))
        self.mean.update_state(tf.math.count_nonzero(x > 0))
        results = {metric.name: metric.result() for metric in self.metrics}
        return results | {"near": near, "rows": rows, "words": 2 * words, "half": near / rows}


def test_whole_numbers_of_a_batch_are_counted_once():
    found = check(lambda: CountsRows(lambda model, y, p: MSE(y, p)))
    assert found["rows"][-1] == len(X) % BATCH


# ----------------------------------------------------------------------- data


@pytest.mark.slow
def test_two_batches_of_other_sizes():
    """A step gets 3 labelled and 8 unlabelled rows, as in semi-supervised training."""
    few = tf.data.Dataset.from_tensor_slices((X[:15], Y[:15])).batch(3)
    many = tf.data.Dataset.from_tensor_slices(X).batch(8)

    class Semi(Tagger):
        def train_step(self, data):
            (x, y), more = data
            with tf.GradientTape() as tape:
                loss = MSE(y, self(x)) + 0.1 * tf.reduce_mean(tf.square(self(more)))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return {"loss": loss}

    def build():
        model = Semi(None, 1)
        model.compile(keras.optimizers.SGD(0.05))
        return model

    def train(model):
        return model.fit(tf.data.Dataset.zip((few, many)), epochs=2, verbose=0).history

    check_twins(build, train)


@pytest.mark.slow
def test_a_penalty_of_activities_with_static_rows():
    """All batches have 16 rows, so Keras divides the penalty by a number that no graph shows."""

    def build():
        penalty = keras.regularizers.L1L2(0.01, 0.1)
        hidden = layers.Dense(4, activity_regularizer=penalty)
        model = keras.Sequential([keras.Input(X.shape[1:]), hidden, layers.Dense(Y.shape[-1])])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    check_twins(build, functools.partial(fit, x=X[: 2 * BATCH], y=Y[: 2 * BATCH]))


def test_static_rows_and_an_unknown_width():
    """A ``window`` that is flattened knows its rows, and not how long they are.

    One device counts such a metric's samples once more in the step that finds no data; so this is
    compared with numpy.
    """
    numbers = np.sin(np.arange(60.0)).astype(np.float32)
    series = tf.data.Dataset.from_tensor_slices(numbers).window(7, shift=1, drop_remainder=True)
    rows = series.flat_map(lambda window: window.batch(7))
    windows = rows.map(lambda row: (row[:-1], row[-1:])).batch(8, drop_remainder=True)
    with two().scope():
        model = keras.Sequential([keras.Input([6]), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    found = model.evaluate(windows, verbose=0, return_dict=True)
    x = np.lib.stride_tricks.sliding_window_view(numbers, 7)[:48]
    errors = x[:, :6] @ model.layers[0].kernel.numpy() - x[:, 6:]
    assert found["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-6)
    assert found["loss"] == pytest.approx(np.square(errors).mean(), rel=1e-6)


@pytest.mark.one_in(3)
@grid("optimizer, lookup", ["SGD", "Adam", "Adagrad"], [False, True], aspects=singles)
def test_sparse_inputs(optimizer, lookup):
    def train(model):
        return model.fit(sparse_rows(), epochs=2, verbose=0).history

    check_twins(functools.partial(of_sparse_rows, optimizer, lookup), train)
