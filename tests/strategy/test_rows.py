"""A last batch of one row, of which a replica gets nothing: its layers have a row to work on, and
that row counts nowhere.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.strategy.twins import check_twins, outcome, two

ROWS, BATCH, LENGTH, KINDS = 33, 16, 6, 2


def numbers(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


SERIES = numbers(ROWS, LENGTH, 3)
IMAGES = numbers(ROWS, 4, 4, 1)
TARGETS = (np.arange(ROWS) % KINDS).astype(np.int32)

BODIES = {
    "LSTM": (SERIES, lambda: [layers.LSTM(3)]),
    "masked GRU": (SERIES, lambda: [layers.Masking(0.0), layers.GRU(3)]),
    "Conv1D": (SERIES, lambda: [layers.Conv1D(3, 3), layers.GlobalMaxPooling1D()]),
    "Conv2D + BN": (
        IMAGES,
        lambda: [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Flatten()],
    ),
    "add_loss": (SERIES, lambda: [layers.Flatten(), layers.ActivityRegularization(0.1)]),
}


OFTEN = "Conv2D + BN"  # a layer that counts over rows, and one that reads images


@pytest.fixture(
    params=[pytest.param(n, marks=[] if n == OFTEN else pytest.mark.slow) for n in BODIES]
)
def program(request):
    x, body = BODIES[request.param]

    def build():
        model = keras.Sequential([keras.Input(x.shape[1:]), *body(), layers.Dense(KINDS)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
        return model

    return x, build


def test_all_that_keras_does_with_one_row_equals_one_device(program):
    x, build = program
    how = {"batch_size": BATCH, "verbose": 0}

    def train(model):
        seen = model.fit(x, TARGETS, shuffle=False, validation_data=(x, TARGETS), **how).history
        one = model.evaluate(x[:1], TARGETS[:1], return_dict=True, **how)
        seen |= {f"evaluated {name}": value for name, value in one.items()}
        seen["predicted"] = model.predict(x[:1], **how)
        seen["all predicted"] = model.predict(x, **how)
        return seen

    found = check_twins(build, train)
    assert found["predicted"].shape == (1, KINDS)
    assert found["all predicted"].shape == (ROWS, KINDS)


def test_a_row_that_is_not_there_is_in_no_metric():
    """Try metrics of any kind: one counts how often it is updated, and one sums rows."""

    def build():
        model = keras.Sequential([keras.Input([3]), layers.Dense(1)])
        counts = [keras.metrics.TruePositives(name="hits"), keras.metrics.MeanSquaredError()]
        model.compile("sgd", "mse", metrics=counts)
        return model

    x, y = numbers(BATCH + 1, 3), np.ones([BATCH + 1, 1], np.float32)

    def train(model):
        return model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history

    check_twins(build, train)


@pytest.mark.slow
def test_words_are_lent_as_well():
    """Texts can't be sent by an all-reduce: the replica works on an empty one."""
    words = tf.constant([[word] for word in ["a", "b", "c", "a", "b"]])

    def build():
        text = keras.Input([1], dtype="string")
        known = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
        model = keras.Model(text, layers.Dense(1)(known(text)))
        model.compile("sgd", "mse")
        return model

    def train(model):
        seen = model.fit(words, tf.ones([5, 1]), batch_size=4, shuffle=False, verbose=0).history
        return seen | {"predicted": model.predict(words, batch_size=4, verbose=0)}

    check_twins(build, train)


def test_ragged_batches_have_rows_too():
    rows = tf.ragged.constant([[1, 2], [3], [1], [2, 3], [1]], dtype=tf.int32)
    data = tf.data.Dataset.from_tensor_slices((rows, tf.ones([5, 1]))).batch(4)
    seen = []

    def build():
        class Sums(keras.Model):
            def __init__(self):
                super().__init__()
                self.scale = self.add_weight(shape=[], initializer="ones")

            def call(self, x):
                seen.append(type(x))
                return self.scale * tf.cast(tf.reduce_sum(x, 1, keepdims=True), tf.float32)

        model = Sums()
        model.compile(keras.optimizers.SGD(0.001), "mse", jit_compile=False)
        return model

    check_twins(build, lambda model: model.fit(data, shuffle=False, verbose=0).history)
    assert tf.RaggedTensor in seen


def test_sparse_batches_keep_what_is_known_of_their_shape():
    """A model that is built by its first prediction has to know how long rows are."""
    rows = tf.sparse.from_dense(np.round(numbers(6, 4)))
    data = tf.data.Dataset.from_tensor_slices(rows).batch(2)

    def build():
        return keras.Sequential([layers.Dense(3, kernel_initializer="ones")])

    found = check_twins(build, lambda model: {"predicted": model.predict(data, verbose=0)})
    assert found["predicted"].shape == (6, 3)


def test_predictions_in_a_dict_lose_the_lent_row():
    def build():
        x = keras.Input([LENGTH, 3])
        hidden = layers.LSTM(3)(x)
        model = keras.Model(x, {"a": layers.Dense(1)(hidden), "b": [hidden]})
        model.compile("sgd", {"a": "mse"})
        return model

    _, weights = outcome(two(), build, lambda model: {})
    with two().scope():
        model = build()
    model.set_weights(weights)
    found = model.predict(SERIES[:17], batch_size=16, verbose=0)
    alone = build()
    alone.set_weights(weights)
    expected = alone.predict(SERIES[:17], batch_size=16, verbose=0)
    assert found["a"].shape == (17, 1)
    np.testing.assert_allclose(found["a"], expected["a"], atol=1e-6)
    np.testing.assert_allclose(found["b"][0], expected["b"][0], atol=1e-6)


def test_one_number_for_a_batch_is_no_prediction():
    with two().scope():
        model = keras.Sequential([keras.Input([3]), layers.Lambda(keras.ops.sum, output_shape=())])
        model.compile()
    with pytest.raises(ValueError, match="the model returns one number for a whole batch"):
        model.predict(numbers(8, 3), verbose=0)
