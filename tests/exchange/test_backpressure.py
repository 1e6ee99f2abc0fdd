"""A backward pass waits for the buckets that it has sent, and never for itself."""

import numpy as np
import tensorflow as tf

from tfscale.exchange.backpressure import Backpressure

LAYERS = 8


def layer(x, weight, name):
    @tf.custom_gradient
    def forward(x, weight):
        def backward(gradient):
            toward = tf.matmul(gradient, weight, transpose_b=True)
            return toward, tf.matmul(x, gradient, transpose_a=True, name=f"computed_{name}")

        return tf.matmul(x, weight), backward

    return forward(x, weight)


def waits_for(operation, name):
    """Return whether an operation runs after the one of that name."""
    todo, seen = [operation], set()
    while todo:
        op = todo.pop()
        if op.name == name:
            return True
        if op not in seen:
            seen.add(op)
            todo += [x.op for x in op.inputs] + list(op.control_inputs)
    return False


def gradients_of(x, weights):
    with tf.GradientTape() as tape:
        tape.watch(weights)
        h = x
        for i, weight in enumerate(weights):
            h = layer(h, weight, i)
        total = tf.reduce_sum(h)
    return tape.gradient(total, weights)


def sent(gradients):
    """Send gradients, the last first, and return what was sent."""
    backpressure, found = Backpressure(), {}
    for i in reversed(range(LAYERS)):
        found[i] = tf.identity(gradients[i], name=f"sent_{i}")
        backpressure.sent([gradients[i]], [found[i]])
    return [found[i] for i in range(LAYERS)]


def test_few_gradients_wait_to_be_sent():
    weights = [tf.eye(3) * (i + 1) for i in range(LAYERS)]

    @tf.function
    def step(x, weights):
        return sent(gradients_of(x, weights))

    for i, gradient in enumerate(step(tf.ones([2, 3]), weights)):
        np.testing.assert_allclose(gradient, np.full((3, 3), 2 * 40320 / (i + 1)))
    graph = step.get_concrete_function(tf.ones([2, 3]), weights).graph
    for i in range(LAYERS):
        computed = graph.get_operation_by_name(f"computed_{i}")
        assert waits_for(computed, f"sent_{i + 2}") == (i + 2 < LAYERS)
        assert not waits_for(computed, f"sent_{i + 1}"), "one bucket is computed meanwhile"


def test_gradients_that_need_each_other_do_not_wait():
    """A norm of all gradients needs the first before the last is sent."""
    weights = [tf.eye(3) for _ in range(LAYERS)]

    @tf.function
    def step(x, weights):
        found, _ = tf.clip_by_global_norm(gradients_of(x, weights), 1.0)
        return sent(found)

    total = sum(float(tf.reduce_sum(g * g)) for g in step(tf.ones([2, 3]), weights))
    np.testing.assert_allclose(total, 1, rtol=1e-5)


def test_a_gradient_of_two_weights_waits_for_nothing():
    """The gradient of an added weight is also what the layers before get."""

    @tf.function
    def step(x, weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            h = x
            for weight in weights:
                h = tf.tanh(h) + weight
            total = tf.reduce_sum(h)
        return sent(tape.gradient(total, weights))

    found = step(tf.zeros([2, 3]), [tf.zeros([2, 3]) for _ in range(LAYERS)])
    np.testing.assert_allclose(found[0], np.ones((2, 3)))


def test_eager_steps_wait_for_nothing():
    Backpressure().sent([tf.ones([2])], [tf.ones([2])])
