"""Momentum correction against momentum that has no rate in it."""

import keras
import numpy as np
import pytest

from tests.callbacks.warmups import BATCH, STEPS, bits, compiled, fit, momentum
from tfscale import schedules
from tfscale.callbacks import Warmup
from tfscale.optimizers import LARS

# A steep warm-up and two drops: at each of them old rates in a buffer would show.
STEEP = schedules.Drops(0.4, at=[8, 16], factor=0.25, warmup=5, start=0.02)


def train_on(gradients, optimizer, **settings):
    """The path of a weight that has these gradients, one for each step."""
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer, lambda gradient, out: gradient * out)
    model.layers[0].kernel.assign([[0.0]])
    path = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: path.append(model.get_weights()[0].item())
    )
    ones, y = np.ones([len(gradients), 1]), np.reshape(gradients, [-1, 1])
    callbacks = [Warmup(settings.pop("schedule", STEEP), **settings), look]
    model.fit(ones, y, batch_size=1, shuffle=False, verbose=0, callbacks=callbacks)
    return np.array(path)


GRADIENTS = np.random.default_rng(0).standard_normal(24)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_becomes_that_of_the_paper(nesterov):
    """Equation 9: u = m u + g, w = w - rate u."""
    optimizer = keras.optimizers.SGD(0.4, momentum=0.9, nesterov=nesterov)
    found = train_on(GRADIENTS, optimizer, momentum_correction=True)
    u, w, expected = 0.0, 0.0, []
    for step, g in enumerate(GRADIENTS):
        u = 0.9 * u + g
        w -= float(STEEP(step)) * (0.9 * u + g if nesterov else u)
        expected.append(w)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    plain = train_on(GRADIENTS, keras.optimizers.SGD(0.4, momentum=0.9, nesterov=nesterov))
    assert np.max(np.abs(plain - expected)) > 0.1  # the correction is no trifle


def test_rmsprop_likewise():
    optimizer = keras.optimizers.RMSprop(0.4, momentum=0.9)
    found = train_on(GRADIENTS, optimizer, momentum_correction=True)
    u, v, w, expected = 0.0, 0.0, 0.0, []
    for step, g in enumerate(GRADIENTS):
        v = 0.9 * v + 0.1 * g**2
        u = 0.9 * u + g / np.sqrt(v + optimizer.epsilon)
        w -= float(STEEP(step)) * u
        expected.append(w)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_lars_in_its_papers_form_becomes_the_popular_one():
    def trained(form, correction):
        model = compiled(LARS(0.4, momentum=0.9, form=form, trust_coefficient=0.1, fused=False))
        fit(model, [Warmup(STEEP, momentum_correction=correction)])
        return np.concatenate([w.ravel() for w in model.get_weights()])

    corrected, popular = trained("paper", True), trained("popular", False)
    np.testing.assert_allclose(corrected, popular, rtol=0, atol=1e-5)
    assert np.max(np.abs(trained("paper", False) - popular)) > 1e-2
    np.testing.assert_array_equal(trained("popular", True), popular)


@pytest.mark.parametrize(
    "optimizer",
    [lambda: keras.optimizers.Adam(0.1), lambda: keras.optimizers.SGD(0.1)],
)
def test_what_needs_none_is_left_alone(optimizer):
    corrected, plain = compiled(optimizer()), compiled(optimizer())
    fit(corrected, [Warmup(STEEP, momentum_correction=True)], epochs=2)
    fit(plain, [Warmup(STEEP)], epochs=2)
    assert bits(corrected) == bits(plain)


def test_accumulated_windows_are_corrected_once():
    gradients = np.repeat(GRADIENTS[:12], 2)
    slow = schedules.Drops(0.4, at=[8, 16], factor=0.25, warmup=5, start=0.02)
    optimizer = momentum(gradient_accumulation_steps=2)
    found = train_on(gradients, optimizer, schedule=slow, momentum_correction=True)
    u, w, expected = 0.0, 0.0, []
    for update, g in enumerate(GRADIENTS[:12]):
        expected.append(w)
        u = 0.9 * u + g
        w -= float(slow(2 * update + 1)) * u
        expected.append(w)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "schedule",
    [schedules.Constant(0.4, warmup=6), schedules.Polynomial(0.4, end=10)],
    ids=["from zero", "to zero"],
)
def test_a_rate_of_zero_is_no_trouble(schedule):
    path = train_on(GRADIENTS, momentum(), schedule=schedule, momentum_correction=True)
    assert np.all(np.isfinite(path))
    assert np.ptp(path[10:]) == 0 or float(schedule(23)) > 0  # at zero nothing moves


def test_an_optimizer_that_nobody_knows_is_refused():
    class Mine(keras.optimizers.SGD):
        pass

    with pytest.raises(ValueError, match="momentum of Mine contains the learning rate"):
        fit(compiled(Mine(0.4)), [Warmup(STEEP, momentum_correction=True)])


def test_a_large_batch_recipe_needs_all_of_it():
    """Batch, epochs and correction together: half a batch, half a rate, the same direction."""
    recipe = schedules.Drops(0.4, at=[3], warmup=2, start=0.1, unit="epochs", base_batch=2 * BATCH)
    model = compiled(momentum())
    warm = Warmup(recipe, batch=BATCH, momentum_correction=True)
    fit(model, [warm], epochs=4)
    assert warm.schedule.get_config() == recipe.for_batch(BATCH).in_steps(STEPS).get_config()
    assert float(model.optimizer.learning_rate) == pytest.approx(0.02)
