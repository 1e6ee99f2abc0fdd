"""Three small problems, two convex and one not, whose least losses are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from scipy.optimize import minimize

from tests.optimizers.common import at


@dataclass(frozen=True)
class Problem:
    variables: list[keras.Variable]
    loss: Callable[[], tf.Tensor]
    least: float


def quadratic(dtype="float32"):
    """Convex; curvatures from 1 to 30."""
    curvature = tf.constant(np.geomspace(1, 30, 8), dtype)
    w = at("kernel", np.random.default_rng(1).standard_normal(8) + 3, dtype)
    return Problem([w], lambda: tf.reduce_sum(curvature * tf.square(w - 1.0)) / 2, 0.0)


def logistic(dtype="float32"):
    """Convex: softmax regression with labels that no plane divides, and a small penalty."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((90, 4))
    labels = (x @ rng.standard_normal((4, 3)) + rng.standard_normal((90, 3))).argmax(1)
    kernel = at("kernel", rng.standard_normal((4, 3)), dtype)
    bias = at("bias", np.zeros(3), dtype)

    def loss(of=(kernel, bias)):
        rows = tf.constant(x, of[0].dtype) @ of[0] + of[1]
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, rows)
        return tf.reduce_mean(entropy) + 0.01 * tf.nn.l2_loss(of[0])

    def in_float64(flat):
        flat = tf.constant(flat, tf.float64)
        return loss((tf.reshape(flat[:12], (4, 3)), flat[12:])).numpy()

    return Problem([kernel, bias], loss, float(minimize(in_float64, np.zeros(15)).fun))


def factors(dtype="float32"):
    """Make a problem that is not convex: two thin matrices with a given product of rank 2."""
    rng = np.random.default_rng(3)
    wanted = tf.constant(rng.standard_normal((6, 2)) @ rng.standard_normal((2, 5)), dtype)
    left = at("left/kernel", rng.standard_normal((6, 2)), dtype)
    right = at("right/kernel", rng.standard_normal((2, 5)), dtype)
    return Problem(
        [left, right], lambda: tf.reduce_mean(tf.square(tf.matmul(left, right) - wanted)), 0.0
    )


PROBLEMS = [quadratic, logistic, factors]


def descend(problem, optimizer, steps):
    """The losses before each step and after the last."""

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = problem.loss()
        optimizer.apply(tape.gradient(loss, problem.variables), problem.variables)
        return loss

    optimizer.build(problem.variables)
    return [float(step()) for _ in range(steps)] + [float(problem.loss())]
