"""Helpers of the tests of optimizers."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf

SHAPES = {"kernel": (7, 5), "bias": (5,), "gamma": (5,), "embeddings": (11, 3)}


def at(path, value, dtype="float32"):
    """A variable with the path that it would have within layers."""
    *scopes, name = path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable(value, dtype=dtype, name=name)


def variables(seed=0, dtype="float32"):
    """One of each kind, none of them zero."""
    rng = np.random.default_rng(seed)
    return [
        keras.Variable(rng.standard_normal(shape), dtype=dtype, name=name)
        for name, shape in SHAPES.items()
    ]


def gradients(steps, seed=1, dtype="float32"):
    """Return the gradients of all ``variables()`` for each step, of many sizes."""
    rng = np.random.default_rng(seed)
    return [
        [
            tf.constant(rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 1), dtype)
            for shape in SHAPES.values()
        ]
        for _ in range(steps)
    ]


def train(optimizer, of, steps):
    """Apply these gradients, one step after the other, in a graph."""
    optimizer.build(of)
    apply = tf.function(lambda *grads: optimizer.apply(list(grads)))
    for grads in steps:
        apply(*grads)
    return [v.numpy().astype(np.float64) for v in of]


def flat(arrays):
    return np.concatenate([np.reshape(a, -1) for a in arrays]).astype(np.float64)


def hessian(gradient, of, step=1e-5):
    """Compute the Hessian by differences: TensorFlow's own second derivatives may be wrong.

    Args:
        gradient: gives the gradients by all variables, in float64.
        of: these variables.
    """

    def rows_of(variable):
        start = variable.numpy()
        for one in np.eye(start.size).reshape(-1, *start.shape) * step:
            variable.assign(start + one)
            above = flat(gradient())
            variable.assign(start - one)
            yield (above - flat(gradient())) / (2 * step)
        variable.assign(start)

    return np.array([row for variable in of for row in rows_of(variable)])


def assert_close(found, expected, relative, what=""):
    """Check each array: no number is off by more than a share of the largest one."""
    for i, (mine, other) in enumerate(zip(found, expected, strict=True)):
        wrong = np.max(np.abs(mine - other)) / np.max(np.abs(other))
        assert wrong <= relative, f"{what} array {i}: off by {wrong:.2g}, {relative:.2g} may"


def expected(rule, steps, rate_of, undecayed=(), unadapted=(), **settings):
    """Return the variables that a rule of ``reference.py`` makes of ``variables()``."""
    decay = settings.pop("decay", 0.0)
    ended = []
    for i, (name, start) in enumerate(zip(SHAPES, variables(), strict=True)):
        own = 0.0 if name in undecayed else decay
        one = rule(start.numpy(), decay=own, adapt=name not in unadapted, **settings)
        for t, grads in enumerate(steps):
            one.step(grads[i].numpy(), rate_of(t))
        ended.append(one.w)
    return ended
