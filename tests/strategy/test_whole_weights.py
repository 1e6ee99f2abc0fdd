"""Whole weights of a step: few at a time, and gathered again for the backward pass."""

import contextlib
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale.bridge.tapes import after_backward_passes
from tfscale.strategy.grid.whole import WholeWeights

LAYERS = 6


class Events:
    """Notes what runs when; everything takes a while, so that all that may run runs meanwhile."""

    def __init__(self):
        self.seen = []

    def note(self, event, x):
        def noting(numbers):
            self.seen.append(event)
            time.sleep(0.01)
            return numbers

        found = tf.numpy_function(noting, [x], x.dtype, stateful=False)
        found.set_shape(x.shape)
        return found

    def gather(self, event, part):
        @tf.custom_gradient
        def forward(part):
            return self.note(event, part), lambda gradient: gradient

        return forward(part)

    def layer(self, i, x, whole):
        @tf.custom_gradient
        def forward(x, whole):
            y = self.note(("forward", i), tf.matmul(x, whole))

            def backward(gradient):
                toward = self.note(("backward", i), tf.matmul(gradient, whole, transpose_b=True))
                return toward, tf.matmul(x, gradient, transpose_a=True)

            return y, backward

        return forward(x, whole)


def held_before(seen, begun, used):
    """Return the most weights that were gathered, and that no layer had used yet."""
    held, most = set(), 0
    for kind, i in seen:
        if kind == begun:
            held.add(i)
            most = max(most, len(held))
        elif kind == used:
            held.discard(i)
    return most


def test_few_weights_are_whole_at_once():
    events, weights = Events(), WholeWeights()
    parts = [tf.eye(3) * (i + 1) for i in range(LAYERS)]

    @tf.function
    def step(x, parts):
        with after_backward_passes(weights.gather_again), tf.GradientTape() as tape:
            tape.watch(parts)
            h = x
            for i, part in enumerate(parts):

                def gather(part, i=i):
                    return events.gather(("gather", i), part)

                def again(part, i=i):
                    return events.note(("again", i), part)

                h = events.layer(i, h, weights.whole(i, part, gather, again))
            return tape.gradient(tf.reduce_sum(h), parts)

    found = step(tf.ones([2, 3]), parts)
    for i, gradient in enumerate(found):
        np.testing.assert_allclose(gradient, np.full((3, 3), 2 * 720 / (i + 1)))
    assert held_before(events.seen, "gather", "forward") <= 2, events.seen
    assert held_before(events.seen, "again", "backward") <= 2, events.seen
    again = {i for kind, i in events.seen if kind == "again"}
    assert again == {1, 2, 3, 4}, "nothing needs the first again, and the last is still there"


class Penalized(keras.Model):
    def __init__(self):
        super().__init__()
        self.all = [keras.layers.Dense(40, "tanh") for _ in range(3)]

    def call(self, x):
        for layer in self.all:
            x = layer(x) + keras.ops.matmul(x[:, :40], keras.ops.transpose(layer.kernel[:40]))
        return x

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                out = self(x, training=True)
                total = tf.reduce_sum(out**2, 1)
            slope = inner.gradient(total, x)
            penalty = tf.reduce_mean(tf.reduce_sum(slope**2, 1))
            loss = self.compute_loss(x, y, out) + penalty
        grads = outer.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


def trained(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = Penalized()
        model.compile(keras.optimizers.Adam(1e-3), "mse")
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal([40, 60], np.float32), draw.standard_normal([40, 40], np.float32)
    model.fit(x, y, 16, 2, verbose=0, shuffle=False)
    return [np.array(v.numpy()) for v in model.weights]


def test_weights_are_gathered_again_for_each_backward_pass():
    strategy = tfscale.ScaleStrategy("ring", devices=["CPU:0", "CPU:1"], shard="all")
    for one, whole in zip(trained(strategy), trained(None), strict=True):
        np.testing.assert_allclose(one, whole, atol=1e-5)
    buckets = {bucket.label for bucket in strategy.extended.team.communicators[0].totals()}
    again = {label for label in buckets if label.endswith(", again")}
    assert len(again) == 3, sorted(buckets)
