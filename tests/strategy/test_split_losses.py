"""Losses of logits in slices: programs that train as on one device, and what a team sends.

Numbers are float64, so that a wrong sum shows: rounding is below 1e-12.
"""

import collections
import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, optimizers

import tfscale
from tfscale.bridge.installed import KERAS_2

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.skipif(KERAS_2, reason="grids need Keras 3"),
]

CLASSES, STEPS = 16, 5
RULES = {"table": "vocabulary", "logits": "columns"}
full = pytest.mark.full
is_there = pytest.mark.skipif(
    not hasattr(layers, "ReversibleEmbedding"), reason="this Keras has no ReversibleEmbedding"
)


def cut(devices=2, tensor=2, rules=RULES, pipeline=None, **grid):
    names = [f"CPU:{place}" for place in range(devices)]
    grid = tfscale.Grid(tensor=tensor, **grid)
    more = {} if pipeline is None else {"pipeline": pipeline}
    return tfscale.ScaleStrategy("ring", devices=names, grid=grid, tensor=rules, **more)


# -------------------------------------------------------------------------- programs


def language(kind=keras.Model, activation=None):
    words = keras.Input((STEPS,), dtype="int32")
    x = layers.Embedding(CLASSES, 8, name="table", mask_zero=True)(words)
    x = x + layers.Dense(8, "tanh", name="inner")(x)
    return kind(words, layers.Dense(CLASSES, activation, name="logits")(x))


def tied(**more):
    words = keras.Input((STEPS,), dtype="int32")
    table = layers.ReversibleEmbedding(CLASSES, 8, name="table", mask_zero=True, **more)
    x = table(words)
    x = x + layers.Dense(8, "tanh", name="inner")(x)
    return keras.Model(words, table(x, reverse=True))


def untied():
    return tied(tie_weights=False, logit_soft_cap=3.0)


class Penalized(keras.Model):
    """Model whose own step takes the gradient of a gradient."""

    def train_step(self, data):
        x, y = data
        kernel = self.get_layer("inner").kernel
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = self.compute_loss(x, y, self(x, training=True))
            slope = inner.gradient(loss, kernel.value)
            total = loss + 3 * tf.reduce_sum(tf.square(slope))
        grads = outer.gradient(total, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


class Mixed(keras.Model):
    """Model whose own step needs slices and whole logits, and logs what it got from both."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x, y, logits) + 0.01 * tf.reduce_mean(tf.square(logits))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss, "largest": tf.reduce_mean(tf.reduce_max(logits, -1))}


def sparse(**more):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **more)


def dense(**more):
    return losses.CategoricalCrossentropy(from_logits=True, **more)


def own(y_true, y_pred):
    return losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


def data(loss, rows=40):
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, CLASSES, (2, rows, STEPS))
    is_dense = isinstance(loss, losses.CategoricalCrossentropy)
    return x, np.eye(CLASSES)[y] if is_dense else y, draw.random((rows, STEPS))


def result(strategy, build, loss, optimizer=None, weighted=False, metrics=None, **more):
    """Return all numbers that a training leaves or shows."""
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build()
        made = optimizers.SGD(0.05, momentum=0.9) if optimizer is None else optimizer()
        compiled = loss() if isinstance(loss, type(lambda: 0)) and loss is not own else loss
        model.compile(made, compiled, metrics=metrics, **more)
    x, y, weights = data(compiled)
    weights = weights if weighted else None
    history = model.fit(x, y, 16, 2, sample_weight=weights, shuffle=False, verbose=0).history
    shown = [*map(np.array, history.values())]
    if type(model) is not keras.Model:
        return [v.numpy() for v in (*model.weights, *model.optimizer.variables)] + shown
    shown += [np.array(model.evaluate(x, y, 15, verbose=0)), model.predict(x, 15, verbose=0)]
    return [v.numpy() for v in (*model.weights, *model.optimizer.variables)] + shown


def assert_near(found, expected, tolerance=1e-12):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


CASES = {
    "everything": (
        language,
        lambda: sparse(ignore_class=3),
        {"weighted": True, "metrics": ["accuracy"], "optimizer": lambda: optimizers.Adam(0.01)},
    ),
    "smooth": (language, lambda: dense(label_smoothing=0.1), {"weighted": True}),
    "tied": (tied, sparse, {}),
    "untied": (untied, sparse, {"metrics": ["accuracy"]}),
    "sum": (language, lambda: sparse(reduction="sum"), {"weighted": True}),
    "mean of weights": (
        language,
        lambda: sparse(reduction="mean_with_sample_weight", ignore_class=3),
        {"weighted": True},
    ),
    "none": (language, lambda: sparse(reduction=None), {}),
    "clipping": (language, sparse, {"optimizer": lambda: optimizers.SGD(0.1, clipnorm=0.02)}),
    "scaling": (
        language,
        sparse,
        {"optimizer": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1))},
    ),
    "activation": (lambda: language(activation="gelu"), sparse, {}),
    "probabilities": (
        lambda: language(activation="softmax"),
        losses.SparseCategoricalCrossentropy,
        {},
    ),
    "own loss": (language, own, {}),
    "several steps": (language, sparse, {"steps_per_execution": 3}),
    "eager": (language, sparse, {"run_eagerly": True}),
    "own step": (lambda: language(Mixed), sparse, {}),
    "gradient of a gradient": (lambda: language(Penalized), sparse, {}),
}
_TIED = ("tied", "untied")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("case", "devices", "tensor"),
    [
        ("everything", 4, 2),
        pytest.param("tied", 2, 2, marks=is_there),
        *[
            pytest.param(case, *layout, marks=[full, is_there] if case in _TIED else full)
            for case in CASES
            for layout in ((2, 2), (4, 2), (4, 4))
            if (case, *layout) not in (("everything", 4, 2), ("tied", 2, 2))
            # A square of a mean gradient is no mean over replicas that read different rows.
            if (case, layout) != ("gradient of a gradient", (4, 2))
        ],
    ],
)
def test_losses_of_slices_train_as_one_device(case, devices, tensor):
    build, loss, more = CASES[case]
    expected = result(None, build, loss, **more)
    assert_near(result(cut(devices, tensor, _rules(build)), build, loss, **more), expected)


def _rules(build):
    return {"table": "vocabulary"} if build in (tied, untied) else RULES


@full
@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size"])
def test_the_last_stage_of_a_pipeline_takes_slices(reduction):
    def build():
        words = keras.Input((STEPS,), dtype="int32")
        x = layers.Embedding(CLASSES, 8, name="table")(words)
        x = layers.Dense(8, "tanh", name="inner")(x)
        return keras.Model(words, layers.Dense(CLASSES, name="logits")(x))

    more = {"metrics": ["accuracy"], "optimizer": lambda: optimizers.SGD(0.001)}

    def loss():
        return sparse(reduction=reduction)

    strategy = cut(4, 2, stages=2, pipeline=tfscale.Pipeline(["inner"], 4))
    assert_near(result(strategy, build, loss, **more), result(None, build, loss, **more))


@full
@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    [(lambda: optimizers.SGD(0.05), 1e-6), (lambda: optimizers.Adam(0.001), 1e-5)],
)
def test_single_precision(optimizer, tolerance):
    keras.config.set_floatx("float32")
    expected = result(None, language, sparse, optimizer)
    assert_near(result(cut(4), language, sparse, optimizer), expected, tolerance)


@full
def test_mixed_precision_trains():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert_near(result(cut(), language, sparse), result(None, language, sparse), 0.05)


# ----------------------------------------------------------------------------- bytes


def sent_by_all(strategy):
    """Return the bytes that replicas have sent for logits and the loss, by the names of what."""
    found = collections.Counter()
    for communicator in strategy.teams.tensor.communicators:
        for execution in communicator.log():
            label = execution.bucket.label.replace("sparse_categorical_crossentropy", "the loss")
            if "loss" in label or "logits" in label:
                found[label] += execution.sent
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("metrics", [None, ["accuracy"]])
def test_three_numbers_of_a_row_travel_instead_of_its_logits(metrics):
    """A metric needs whole logits, but no gradient of them."""
    strategy, rows = cut(rules={"logits": "columns"}), 8 * STEPS
    with strategy.scope():
        model = language()
        model.compile("sgd", sparse(), metrics=metrics)
    x, y, _ = data(sparse(), 8)
    model.fit(x, y, 8, verbose=0)
    number = 8 * 2  # bytes of a number, which each of two replicas sends
    expected = {
        "largest logits of the loss": rows * number,
        "sums of the loss": 2 * rows * number,
        "gradient of sums of the loss": 2 * rows * number,
    }
    # Each replica sends its half of the logits.
    expected |= {} if metrics is None else {"whole output of logits": rows * CLASSES // 2 * number}
    assert dict(sent_by_all(strategy)) == expected


# --------------------------------------------------------------------------- refusals


def test_a_label_outside_of_the_classes_fails_as_on_one_device():
    strategy = cut(rules={"logits": "columns"})
    with strategy.scope():
        model = language()
        model.compile("sgd", sparse())
    x, y, _ = data(sparse(), 8)
    with pytest.raises(tf.errors.InvalidArgumentError, match="labels outside of the range"):
        model.fit(x, y + CLASSES, 8, verbose=0)
