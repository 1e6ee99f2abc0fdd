"""Gradients of weights that a later turn of a pipeline computes."""

import time

import tensorflow as tf

from tfscale.bridge.graphs import next_number
from tfscale.strategy.pipeline.late import put_off


def test_late_gradients_wait_and_the_others_do_not():
    seen = []

    def noted(word, x):
        def note(numbers):
            time.sleep(0.05 if word == "turn" else 0)
            seen.append(word)
            return numbers

        found = tf.numpy_function(note, [x], x.dtype, stateful=False)
        found.set_shape(x.shape)
        return found

    @tf.custom_gradient
    def layer(x, weight):
        def backward(gradient):
            return noted("input", gradient), noted("weight", tf.reduce_sum(gradient, 0))

        return x + weight, backward

    @tf.function
    def step(x, weight):
        with tf.GradientTape() as tape:
            tape.watch([x, weight])
            y = layer(x, weight)
        begin = next_number(tf.compat.v1.get_default_graph())
        back, own = tape.gradient(y, [x, weight])
        with tf.control_dependencies([back]):
            turn = noted("turn", tf.zeros([1]))
        put_off([own], [back], begin, [turn])
        return back, own, turn

    back, own, _ = step(tf.ones([3, 2]), tf.ones([2]))
    assert seen == ["input", "turn", "weight"]
    assert back.shape == (3, 2) and own.numpy().tolist() == [3, 3]
