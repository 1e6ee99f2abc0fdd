"""LARS: closed forms and a reference in float64."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers import common, reference
from tests.optimizers.common import assert_close, gradients, train, variables
from tfscale.optimizers import LARS

G = (0.0, 2.0)


def after(steps, rates=(100.0, 100.0), start=(3.0, 4.0), gradient=G, **arguments):
    """After so many steps with the same gradient."""
    w = keras.Variable(start, name="kernel")
    optimizer = LARS(learning_rate=1.0, **arguments)
    for rate in rates[:steps]:
        optimizer.learning_rate = rate
        optimizer.apply([tf.constant(gradient)], [w])
    return w.numpy()


def test_the_first_step_is_as_long_as_the_trust_says():
    """100 * 0.001 |w| in the direction of g."""
    np.testing.assert_allclose(after(1), [3, 3.5], rtol=1e-6)


def test_epsilon_and_decay_are_in_the_denominator():
    """The rate is 100 * 0.001 * 5 / (2 + 0.5 * 5 + 0.5) = 0.1"""
    found = after(1, weight_decay=0.5, epsilon=0.5)
    np.testing.assert_allclose(found, [3 - 0.1 * 1.5, 4 - 0.1 * 4.0], rtol=1e-6)


def test_momentum_keeps_the_rate_that_a_step_had_in_the_papers_form():
    """0.5 of the first step; then 0.9 * 0.5 and a tenth of the new |w|, for which rate is 50."""
    second = 0.9 * 0.5 + 50 * 0.001 * np.hypot(3, 3.5)
    np.testing.assert_allclose(after(2, rates=(100.0, 50.0)), [3, 3.5 - second], rtol=1e-6)


def test_momentum_takes_the_rate_of_now_in_the_popular_form():
    second = (0.9 * 0.5 / 100 + 0.001 * np.hypot(3, 3.5)) * 50
    found = after(2, rates=(100.0, 50.0), form="popular")
    np.testing.assert_allclose(found, [3, 3.5 - second], rtol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_both_forms_are_the_same_while_the_rate_is(nesterov):
    paper, popular = (after(2, form=form, nesterov=nesterov) for form in ("paper", "popular"))
    np.testing.assert_allclose(paper, popular, rtol=1e-6)


def test_nesterov_looks_ahead():
    """0.9 * 0.5 + 0.5"""
    np.testing.assert_allclose(after(1, nesterov=True), [3, 4 - 0.95], rtol=1e-6)


def test_what_is_not_adapted_moves_as_in_sgd():
    found = after(2, rates=(0.1, 0.1), exclude_from_adaptation=["kernel"], weight_decay=0.5)
    w = keras.Variable([3.0, 4.0])
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    for _ in range(2):
        sgd.apply([tf.constant(G) + 0.5 * w], [w])
    np.testing.assert_allclose(found, w, rtol=1e-6)


def test_larc_moves_nothing_faster_than_the_rate():
    """The local rate is 0.0025: below 0.01 it counts, above 0.001 the rate does."""
    for rate, expected in ((0.01, 0.0025), (0.001, 0.001)):
        found = after(1, rates=(rate,), trust_clip=True)
        np.testing.assert_allclose(found, [3, 4 - 2 * expected], rtol=1e-6)


def test_a_rate_of_zero_is_no_step():
    """A warm-up begins with such a rate; LARC divides by it."""
    for clip in (False, True):
        np.testing.assert_array_equal(after(1, rates=(0.0,), trust_clip=clip), [3, 4])


def test_where_there_is_no_norm_the_rate_is_the_plain_one():
    found = after(1, rates=(0.1,), start=(0.0, 0.0))
    np.testing.assert_allclose(found, [0, -0.2], rtol=1e-6)
    found = after(1, rates=(0.1,), gradient=(0.0, 0.0), weight_decay=0.5)
    np.testing.assert_allclose(found, [3 * 0.95, 4 * 0.95], rtol=1e-6)


SETTINGS = {
    "plain": ({}, {}),
    "decay": ({"weight_decay": 0.1}, {"decay": 0.1}),
    "nesterov": ({"nesterov": True, "weight_decay": 0.1}, {"nesterov": True, "decay": 0.1}),
    "popular": ({"form": "popular", "epsilon": 0.1}, {"popular": True, "eps": 0.1}),
    "popular nesterov": (
        {"form": "popular", "nesterov": True, "weight_decay": 0.1},
        {"popular": True, "nesterov": True, "decay": 0.1},
    ),
    "larc": (
        {"trust_clip": True, "trust_coefficient": 0.02, "weight_decay": 0.1},
        {"clip": True, "trust": 0.02, "decay": 0.1},
    ),
    "others": (
        {"momentum": 0.5, "trust_coefficient": 0.01, "form": "popular"},
        {"momentum": 0.5, "trust": 0.01, "popular": True},
    ),
}


expected = functools.partial(common.expected, reference.Lars)


@pytest.mark.parametrize("case", SETTINGS)
def test_200_steps_are_those_of_the_reference(case):
    """Compare with a schedule, and with lists that differ from each other."""
    mine, theirs = SETTINGS[case]
    steps = gradients(200)
    optimizer = LARS(
        keras.optimizers.schedules.PolynomialDecay(0.02, 250, 0.001, power=2),
        exclude_from_weight_decay=["^bias$", "gamma"],
        exclude_from_adaptation=["bias|embed"],
        **mine,
    )
    found = train(optimizer, variables(), steps)
    poly = [(0.02 - 0.001) * (1 - t / 250) ** 2 + 0.001 for t in range(200)]
    lists = {"undecayed": ("bias", "gamma"), "unadapted": ("bias", "embeddings")}
    assert_close(found, expected(steps, poly.__getitem__, **lists, **theirs), 1e-5)


def test_in_float64_it_is_the_reference():
    """A rate that float32 holds exactly: Keras keeps rates in float32."""
    steps = gradients(200, dtype="float64")
    starts = [
        keras.Variable(v.numpy().astype(np.float64), dtype="float64", name=v.name)
        for v in variables()
    ]
    found = train(LARS(2.0, weight_decay=0.1, exclude_from_adaptation=()), starts, steps)
    theirs = expected(steps, lambda t: 2.0, undecayed=("bias", "gamma"), decay=0.1)
    assert_close(found, theirs, 1e-12)


def test_it_keeps_one_number_for_each_of_a_variable():
    optimizer, of = LARS(), variables()
    optimizer.build(of)
    kept = sum(int(np.prod(v.shape)) for v in optimizer.variables[2:])
    assert kept == sum(int(np.prod(v.shape)) for v in of)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum": 1.0}, "momentum is a number, 0 or more and less than 1; got 1.0"),
        ({"trust_coefficient": -1.0}, "trust_coefficient is a number, 0 or more"),
        ({"epsilon": -1.0}, "epsilon is a number, 0 or more; got -1.0"),
        (
            {"form": "popullar"},
            "form is 'paper' or 'popular'; got 'popullar'. Did you mean 'popular'",
        ),
    ],
)
def test_a_refusal_says_what_was_expected(arguments, message):
    with pytest.raises(ValueError, match=message):
        LARS(**arguments)
