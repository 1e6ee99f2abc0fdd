"""LAMB: closed forms, a reference in float64, and the one of Keras."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers import common, reference
from tests.optimizers.common import assert_close, gradients, train, variables
from tfscale.optimizers import LAMB

LENGTH = 5.0  # of the vector (3, 4)


def one_step(gradient, start=(3.0, 4.0), name="kernel", **arguments):
    w = keras.Variable(start, name=name)
    LAMB(learning_rate=0.1, epsilon=0.0, **arguments).apply([tf.constant(gradient)], [w])
    return w.numpy()


def test_the_first_step_is_the_sign_of_the_gradient_as_long_as_the_rate_says():
    found = one_step([10.0, -0.5])
    np.testing.assert_allclose(found, np.array([3, 4]) - 0.1 * LENGTH / 2**0.5 * np.array([1, -1]))


def test_decay_is_inside_the_trust_ratio():
    """The step still has the length of rate |w| where u = sign(g) + decay w."""
    u = np.array([1 + 0.5 * 3, 1 + 0.5 * 4])
    expected = np.array([3, 4]) - 0.1 * LENGTH * u / np.linalg.norm(u)
    np.testing.assert_allclose(one_step([2.0, 7.0], weight_decay=0.5), expected, rtol=1e-6)


def test_what_is_not_adapted_moves_by_the_rate():
    found = one_step([2.0, 7.0], exclude_from_adaptation=["kernel"], weight_decay=0.5)
    np.testing.assert_allclose(found, [3 - 0.1 * 2.5, 4 - 0.1 * 3.0], rtol=1e-6)


def test_without_bias_correction_the_first_step_is_longer():
    """(1 - 0.9) g / sqrt((1 - 0.999) g^2)"""
    plain = {"exclude_from_adaptation": ["kernel"], "bias_correction": False}
    moved = 0.1 * 0.1 / 0.001**0.5
    np.testing.assert_allclose(one_step([2.0, 7.0], **plain), [3 - moved, 4 - moved], rtol=1e-6)


@pytest.mark.parametrize(("bounds", "phi"), [((0, 2), 2), ((8, 9), 8), ((1, 7), LENGTH)])
def test_trust_bounds_bound_the_norm_of_the_variable(bounds, phi):
    moved = 0.1 * phi / 2**0.5
    found = one_step([2.0, 7.0], trust_bounds=bounds)
    np.testing.assert_allclose(found, [3 - moved, 4 - moved], rtol=1e-6)


@pytest.mark.parametrize("bounds", [None, (2.0, 3.0)])
def test_a_variable_of_zeros_moves_by_the_rate(bounds):
    found = one_step([2.0, 7.0], start=(0.0, 0.0), trust_bounds=bounds)
    np.testing.assert_allclose(found, [-0.1, -0.1], rtol=1e-6)


def test_no_gradient_is_no_step():
    w = keras.Variable([3.0, 4.0], name="kernel")
    LAMB(learning_rate=0.1).apply([tf.zeros(2)], [w])
    np.testing.assert_array_equal(w, [3, 4])


SETTINGS = {
    "plain": ({}, {}),
    "decay": ({"weight_decay": 0.1}, {"decay": 0.1}),
    "not corrected": ({"bias_correction": False}, {"debias": False}),
    "bounds": ({"trust_bounds": (0.5, 3)}, {"phi": lambda size: min(max(size, 0.5), 3)}),
    "others": ({"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3}, dict(b1=0.8, b2=0.95, eps=1e-3)),
}


expected = functools.partial(common.expected, reference.Lamb)


@pytest.mark.parametrize("case", SETTINGS)
def test_200_steps_are_those_of_the_reference(case):
    """Compare with a schedule, and with lists that differ from each other."""
    mine, theirs = SETTINGS[case]
    steps = gradients(200)
    optimizer = LAMB(
        keras.optimizers.schedules.CosineDecay(0.05, 150),
        exclude_from_weight_decay=["^bias$", "gamma"],
        exclude_from_adaptation=["bias|embed"],
        **mine,
    )
    found = train(optimizer, variables(), steps)
    cosine = [0.05 * (1 + np.cos(np.pi * min(t, 150) / 150)) / 2 for t in range(200)]
    lists = {"undecayed": ("bias", "gamma"), "unadapted": ("bias", "embeddings")}
    assert_close(found, expected(steps, cosine.__getitem__, **lists, **theirs), 1e-5)


def test_in_float64_it_is_the_reference():
    """A rate that float32 holds exactly: Keras keeps rates in float32."""
    steps = gradients(200, dtype="float64")
    starts = [
        keras.Variable(v.numpy().astype(np.float64), dtype="float64", name=v.name)
        for v in variables()
    ]
    found = train(LAMB(0.0625, weight_decay=0.1, exclude_from_adaptation=()), starts, steps)
    theirs = expected(steps, lambda t: 0.0625, undecayed=("bias", "gamma"), decay=0.1)
    assert_close(found, theirs, 1e-12)


def test_it_is_the_one_of_keras_without_decay():
    steps = gradients(100)
    ours = LAMB(0.01, epsilon=1e-7, exclude_from_adaptation=())
    theirs = keras.optimizers.Lamb(0.01, epsilon=1e-7)
    found, other = train(ours, variables(), steps), train(theirs, variables(), steps)
    # Keras computes 1 - 0.999**t in float32, which for the first t has four digits less.
    assert_close(found, other, 2e-6)


def test_it_is_not_the_one_of_keras_with_decay():
    """Keras's LAMB shrinks variables before the update, by rate times decay."""
    steps = gradients(20)
    ours = LAMB(0.05, weight_decay=1.0, exclude_from_weight_decay=(), exclude_from_adaptation=())
    theirs = keras.optimizers.Lamb(0.05, weight_decay=1.0)
    found, other = train(ours, variables(), steps), train(theirs, variables(), steps)
    assert np.max(np.abs(found[0] - other[0])) / np.max(np.abs(other[0])) > 0.1


def test_it_keeps_two_numbers_for_each_of_a_variable():
    optimizer, of = LAMB(), variables()
    optimizer.build(of)
    kept = sum(int(np.prod(v.shape)) for v in optimizer.variables[2:])
    assert kept == 2 * sum(int(np.prod(v.shape)) for v in of)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta_1": 1.0}, "beta_1 is a number, 0 or more and less than 1; got 1.0"),
        ({"beta_2": -0.1}, "beta_2 is a number, 0 or more"),
        ({"epsilon": -1e-6}, "epsilon is a number, 0 or more; got -1e-06"),
        ({"weight_decay": -0.1}, "weight_decay is a number, 0 or more"),
        ({"trust_bounds": (2, 1)}, "least and the largest norm"),
        ({"trust_bounds": (1,)}, "least and the largest norm"),
        ({"exclude_from_weight_decay": ["("]}, r"exclude_from_weight_decay.* got '\('"),
        ({"exclude_from_adaptation": [3]}, "exclude_from_adaptation\\[0\\] is a regular"),
    ],
)
def test_a_refusal_says_what_was_expected(arguments, message):
    with pytest.raises(ValueError, match=message):
        LAMB(**arguments)
