"""LARS and LAMB where squares leave the range of float32: against float64, fused and plain."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers import reference
from tfscale.optimizers import LAMB, LARS

RNG = np.random.default_rng(0)
DIRECTION, SLOPE = RNG.standard_normal((2, 37))
SIZES = [10.0**power for power in (-30, -22, -18, -9, 0, 9, 18, 22, 30)]
# The step is a share of the variable that float32 can tell from 0.
RATE = 0.25
EPSILON = 1e-6
LARGEST, LEAST = 1e38, 1e-37  # of float32's normal numbers, roundly


def within_float32(*numbers):
    return all(LEAST < abs(number) < LARGEST for number in numbers)


def assert_same_step(optimizer, make_rule, cases):
    """Compare one step that moves a variable for each case."""
    cases = [[x.astype(np.float32) for x in case] for case in cases]
    found = [keras.Variable(w, name="kernel") for w, _ in cases]
    optimizer.apply([tf.constant(g) for _, g in cases], found)
    for variable, (w, g) in zip(found, cases, strict=True):
        rule = make_rule(w)
        rule.step(g, RATE)
        allowed = 2e-6 * np.max(np.abs(rule.w))
        np.testing.assert_allclose(variable.numpy().astype(np.float64), rule.w, 0, allowed)


def ratio_of_lars(w, g, decay):
    return reference.length(w) / (reference.length(g) + decay * reference.length(w))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_lars(fused, decay):
    every = itertools.product(SIZES, SIZES)
    cases = [(size * DIRECTION, slope * SLOPE) for size, slope in every]
    cases = [case for case in cases if within_float32(ratio_of_lars(*case, decay))]
    assert len(cases) > 60
    optimizer = LARS(RATE, momentum=0.5, trust_coefficient=0.5, weight_decay=decay, fused=fused)
    theirs = functools.partial(reference.Lars, trust=0.5, decay=decay, momentum=0.5)
    assert_same_step(optimizer, theirs, cases)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_lamb(fused, decay):
    """The second moment is the gradient's square, by LAMB's rule a number of float32."""
    every = itertools.product(SIZES, [slope for slope in SIZES if slope < 1e19])
    cases = [
        (size * DIRECTION, slope * SLOPE)
        for size, slope in every
        if within_float32(size / (min(1.0, slope / EPSILON) + decay * size))
    ]
    assert len(cases) > 50
    optimizer = LAMB(RATE, epsilon=EPSILON, weight_decay=decay, fused=fused)
    assert_same_step(optimizer, functools.partial(reference.Lamb, decay=decay), cases)
