"""A backward pass waits for the buckets that it has sent, and never for itself."""

import time

import numpy as np
import tensorflow as tf

from tfscale.exchange.backpressure import Backpressure

LAYERS = 8


class Events:
    def __init__(self):
        self.seen = []

    def note(self, event, x, seconds=0.0):
        def noting(numbers):
            time.sleep(seconds)
            self.seen.append(event)
            return numbers

        found = tf.numpy_function(noting, [x], x.dtype, stateful=False)
        found.set_shape(x.shape)
        return found

    def layer(self, i, x, weight):
        @tf.custom_gradient
        def forward(x, weight):
            def backward(gradient):
                toward = tf.matmul(gradient, weight, transpose_b=True)
                product = tf.matmul(x, gradient, transpose_a=True)
                return toward, self.note(("computed", i), product)

            return tf.matmul(x, weight), backward

        return forward(x, weight)

    def most_unsent(self):
        held, most = 0, 0
        for kind, _ in self.seen:
            held += 1 if kind == "computed" else -1
            most = max(most, held)
        return most


def gradients_of(events, x, weights):
    with tf.GradientTape() as tape:
        tape.watch(weights)
        h = x
        for i, weight in enumerate(weights):
            h = events.layer(i, h, weight)
        total = tf.reduce_sum(h)
    return tape.gradient(total, weights)


def sent(events, gradients):
    """Send gradients slowly, the last first, and return what was sent."""
    backpressure, found = Backpressure(), {}
    for i in reversed(range(LAYERS)):
        found[i] = events.note(("sent", i), gradients[i], seconds=0.03)
        backpressure.sent([gradients[i]], [found[i]])
    return [found[i] for i in range(LAYERS)]


def test_few_gradients_wait_to_be_sent():
    events, weights = Events(), [tf.eye(3) * (i + 1) for i in range(LAYERS)]

    @tf.function
    def step(x, weights):
        return sent(events, gradients_of(events, x, weights))

    for i, gradient in enumerate(step(tf.ones([2, 3]), weights)):
        np.testing.assert_allclose(gradient, np.full((3, 3), 2 * 40320 / (i + 1)))
    assert events.most_unsent() <= 3, events.seen


def test_gradients_that_need_each_other_do_not_wait():
    """A norm of all gradients needs the first before the last is sent."""
    events, weights = Events(), [tf.eye(3) for _ in range(LAYERS)]

    @tf.function
    def step(x, weights):
        found, _ = tf.clip_by_global_norm(gradients_of(events, x, weights), 1.0)
        return sent(events, found)

    total = sum(float(tf.reduce_sum(g * g)) for g in step(tf.ones([2, 3]), weights))
    np.testing.assert_allclose(total, 1, rtol=1e-5)


def test_a_gradient_of_two_weights_waits_for_nothing():
    """The gradient of an added weight is also what the layers before get."""
    events = Events()

    @tf.function
    def step(x, weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            h = x
            for weight in weights:
                h = tf.tanh(h) + weight
            total = tf.reduce_sum(h)
        return sent(events, tape.gradient(total, weights))

    found = step(tf.zeros([2, 3]), [tf.zeros([2, 3]) for _ in range(LAYERS)])
    np.testing.assert_allclose(found[0], np.ones((2, 3)))


def test_eager_steps_wait_for_nothing():
    Backpressure().sent([tf.ones([2])], [tf.ones([2])])
