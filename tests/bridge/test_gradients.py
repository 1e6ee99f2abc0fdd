"""Memory that TensorFlow keeps after a training."""

import collections
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

import tfscale
from tfscale.bridge import hooks

DEVICES = ["CPU:0", "CPU:1"]


class Notes(keras.layers.Layer):
    """Weak references to the graphs that it was called in."""

    def build(self, shape):
        self.graphs = []

    def call(self, x):
        self.graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        return x


def trained(how):
    """Weak references to a strategy, to a model and to the graphs of its steps."""
    strategy = tfscale.ScaleStrategy("ring", **how)
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), Notes(), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
    model.fit(np.ones([8, 4]), np.zeros([8]), batch_size=4, verbose=0, validation_split=0.5)
    model.predict(np.ones([8, 4]), verbose=0)
    graphs = [graph for graph in model.layers[0].graphs if isinstance(graph(), FuncGraph)]
    return [weakref.ref(strategy), weakref.ref(model), *graphs]


HOW = {
    "one device": {"devices": DEVICES[:1]},
    "two": {"devices": DEVICES},
    "two, in rounds": {"devices": DEVICES, "sync": tfscale.sync.LocalSGD(2)},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_nothing_stays_in_memory_of_a_model_that_is_gone(how):
    references = trained(how)
    assert len(references) > 4
    gc.collect()
    assert {reference() for reference in references} == {None}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_nothing_of_keras_stays_replaced(how):
    """Other tests may hold strategies that live as long as their module."""

    def on():
        return collections.Counter(hook for hook, _ in hooks.active())

    before = on()
    trained(how)
    gc.collect()
    assert on() == before


@tf.custom_gradient
def cube(x):
    """Cube with a first derivative three times too large, to tell it from TensorFlow's own."""
    return x**3, lambda g: 9 * g * x**2


def within(what, x):
    if what == "a branch":
        return tf.cond(x > 0, lambda: cube(x), lambda: x)
    if what == "a loop":
        return tf.while_loop(lambda i, _: i < 1, lambda i, y: (i + 1, cube(y)), [0, x])[1]
    return cube(x)


@pytest.mark.parametrize("what", ["a function", "a branch", "a loop"])
def test_gradients_of_functions_are_found(what):
    """TensorFlow looks for them in its registry, under the name that an operation has."""
    strategy = tfscale.ScaleStrategy("ring", devices=DEVICES)

    @tf.function
    def cubes(x):
        return strategy.experimental_local_results(strategy.run(lambda: within(what, x)))

    x = tf.Variable(2.0)
    with tf.GradientTape() as second:
        with tf.GradientTape() as first:
            both = tf.add_n(cubes(x))
        gc.collect()
        slope = first.gradient(both, x)
    gc.collect()
    assert both == 2 * 2**3 and slope == 2 * 9 * 2**2
    assert second.gradient(slope, x) == 2 * 18 * 2


def test_a_gradient_may_hold_anything():
    """Such as a dict whose keys have no order."""
    settings = {1: 9.0, "two": [None, {}]}

    @tf.custom_gradient
    def tripled(x):
        return x**3, lambda g: settings[1] * g * x**2

    strategy = tfscale.ScaleStrategy("ring", devices=DEVICES)
    x = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        both = tf.function(lambda: strategy.run(lambda: tripled(x)))()
        first, _ = strategy.experimental_local_results(both)
    assert tape.gradient(first, x) == 9 * 2**2


def test_a_function_that_several_graphs_call_keeps_its_gradient():
    """TensorFlow traces it within the first of them."""

    @tf.function
    def shared(x):
        return cube(x)

    strategy = tfscale.ScaleStrategy("ring", devices=DEVICES)

    def cubes():
        return tf.function(lambda x: strategy.run(lambda: shared(x)))

    x = tf.Variable(2.0)
    cubes()(x)
    gc.collect()
    with tf.GradientTape() as tape:
        of_first, _ = strategy.experimental_local_results(cubes()(x))
    assert tape.gradient(of_first, x) == 9 * 2**2
