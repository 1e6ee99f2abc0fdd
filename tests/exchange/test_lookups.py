"""Rows that all samples look up are one row each, as on one device; the data's own are joined."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.strategy.twins import check_twins
from tfscale.exchange.lookups import are_of_all_samples

LENGTH, WORDS, ROWS = 5, 11, 33
X = np.random.default_rng(1).integers(0, WORDS, [ROWS, LENGTH]).astype(np.int32)
Y = X.sum(1, keepdims=True).astype(np.float32) / WORDS


class Places(layers.Layer):
    """Layer that adds positions, as a transformer does."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(LENGTH, 4)

    def call(self, x):
        return x + self.table(ops.arange(LENGTH))


class PlacesOfEach(Places):
    """Layer that adds positions, from a tensor whose length is read from the data."""

    def call(self, x):
        return x + self.table(ops.arange(0, ops.shape(x)[1]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("places", "optimizer"),
    [
        (Places, "adam"),
        (PlacesOfEach, "rmsprop"),
        pytest.param(Places, "adagrad", marks=pytest.mark.full),
        pytest.param(PlacesOfEach, "adamw", marks=pytest.mark.full),
    ],
)
def test_positions_train_as_on_one_device(places, optimizer):
    """Adam squares the gradient of each row: two halves give another square than their sum."""

    def build():
        words = keras.Input([LENGTH], dtype="int32")
        x = places()(layers.Embedding(WORDS, 4)(words))
        model = keras.Model(words, layers.Dense(1)(layers.Flatten()(layers.ReLU()(x))))
        model.compile(keras.optimizers.get({"class_name": optimizer, "config": {}}), "mse")
        return model

    def train(model):
        return model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history

    check_twins(build, train, 1e-5)


def found(indices_of):
    answers = []
    kept()

    @tf.function
    def traced(x):
        answers.append(are_of_all_samples(indices_of(x)))
        return x

    traced.get_concrete_function(tf.TensorSpec([4, LENGTH], tf.int32))
    return answers[0]


@functools.cache
def kept():
    return tf.Variable([1, 2])


@pytest.mark.parametrize(
    ("indices_of", "same"),
    [
        (lambda x: tf.range(LENGTH), True),
        (lambda x: tf.range(tf.shape(x)[1]), True),
        (lambda x: tf.constant([1, 3]), True),
        (lambda x: kept() + 0, True),
        (lambda x: x[0], False),
        (lambda x: tf.range(LENGTH) + x[0, 0], False),
        (lambda x: tf.random.uniform([3], 0, 5, tf.int32), False),
        (lambda x: tf.random.stateless_uniform([3], [1, 2], 0, 5, tf.int32), False),
        (lambda x: tf.where(x > 0)[:, 0], False),
    ],
)
def test_what_depends_on_the_data(indices_of, same):
    assert found(indices_of) == same


def test_eagerly_lookups_are_taken_for_the_datas():
    assert not are_of_all_samples(tf.range(LENGTH))
