"""FGSM and PGD against their formulas, and the draws that belong to samples."""

import doctest

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.adversarial.models import dense, fit, moved_by_hand, numbers, state
from tfscale.adversarial import FGSM, PGD, examples, examples as examples_function
from tfscale.training.adversarial import attacks, draws


@pytest.fixture(scope="module")
def trained():
    model = dense(keras.layers.Dropout(0.3))
    fit(model)
    return model


def test_fgsm_is_its_formula(trained):
    x, y = numbers()
    found = examples(trained, x, y, FGSM(0.1), batch_size=16)
    np.testing.assert_array_equal(found, moved_by_hand(trained, x, y, 0.1))


def test_the_model_is_as_before(trained):
    before = state(trained)
    examples(trained, *numbers(), PGD(0.1, steps=2))
    for mine, expected in zip(state(trained), before, strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_pgd_is_its_formula(trained):
    x, y = numbers()
    attack = PGD(0.1, steps=4, step_size=0.04, random_start=False)
    expected = x
    for _ in range(4):
        step = moved_by_hand(trained, expected, y, 0.04)
        expected = np.clip(step, x - np.float32(0.1), x + np.float32(0.1))
    np.testing.assert_allclose(examples(trained, x, y, attack), expected, atol=1e-6)


def test_more_steps_find_a_higher_loss(trained):
    x, y = numbers()

    def loss(x):
        return trained.evaluate(x, y, verbose=0)[0]

    far, farther = (loss(examples(trained, x, y, a)) for a in (FGSM(0.3), PGD(0.3, steps=10)))
    assert loss(x) < far <= farther + 1e-6


def test_nothing_leaves_the_range_of_the_data_or_goes_too_far(trained):
    x, y = np.clip(numbers()[0], 0, 1), numbers()[1]
    for attack in (FGSM(0.3, low=0.0, high=1.0), PGD(0.3, low=0.0, high=1.0)):
        found = examples(trained, x, y, attack)
        assert found.min() >= 0 and found.max() <= 1
        assert 0.2 < np.abs(found - x).max() <= 0.3 + 1e-6


def test_a_random_start_is_the_same_wherever_a_sample_is(trained):
    x, y = numbers()
    attack = PGD(0.1, steps=1, step_size=1e-6)
    whole = examples(trained, x, y, attack)
    parts = examples(trained, x[::-1], y[::-1], attack, batch_size=7)[::-1]
    np.testing.assert_allclose(parts, whole, atol=1e-6)
    moved = (whole - x) / 0.1
    assert np.abs(moved).max() <= 1 + 1e-4 and moved.std() == pytest.approx(3**-0.5, abs=0.05)


def test_samples_of_weight_0_stay(trained):
    x, y = numbers()
    weight = np.arange(len(x)) % 2
    found = examples(trained, x, y, FGSM(0.1), sample_weight=weight.astype(np.float32))
    still = np.all(found == x, axis=1)
    np.testing.assert_array_equal(still, weight == 0)


def test_half_precision_moves_as_single_does():
    """Scale the loss: without scaling most gradients would round to 0."""
    x, y = numbers()
    single = dense()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        half = dense()
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(half.optimizer, keras.optimizers.LossScaleOptimizer)
    fit(half, epochs=1)
    single.set_weights(half.get_weights())
    many = np.full((len(x), 1), 1e-6, np.float32)  # so small that fp16 has no number for it
    found = examples(half, x, y, FGSM(0.1), sample_weight=many)
    expected = examples(single, x, y, FGSM(0.1))
    assert np.mean(found == expected) > 0.98
    assert found.dtype == np.float32


def test_draws_look_random_and_differ_from_step_to_step():
    x = [tf.random.stateless_normal([4000, 3], [1, 2])]
    one, other = (draws.uniform(draws.row_keys(x, step)).numpy() for step in (0, 1))
    for found in (one, other):
        assert found.min() >= 0 and found.max() < 1
        counts = np.histogram(found, 20, (0, 1))[0]
        assert np.sum((counts - 200) ** 2 / 200) < 43.8  # chi squared, 19 degrees, 0.1%
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.06


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FGSM(0), "epsilon is a number.* more than 0; got 0"),
        (lambda: FGSM(float("nan")), "got nan"),
        (lambda: PGD(0.1, steps=0), "steps is a whole number, 1 or more; got 0"),
        (lambda: PGD(0.1, step_size=-1), "step_size is a number.* more than 0; got -1"),
        (lambda: FGSM(0.1, low=1, high=0), "low must be below high"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_model_without_a_loss_is_refused():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd")
    with pytest.raises(ValueError, match="has none. Compile it with a loss"):
        examples(model, *numbers(), FGSM(0.1))


def test_examples_in_docstrings(trained):
    x, y = numbers()
    names = {"tfscale": tfscale, "model": dense(), "x": x, "y": y}
    for thing in (attacks.PGD, attacks.FGSM, examples_function):
        finder = doctest.DocTestFinder(recurse=False).find(thing, thing.__name__, globs=names)
        (test,) = [one for one in finder if one.examples]
        assert doctest.DocTestRunner().run(test).failed == 0
