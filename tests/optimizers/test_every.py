"""Behaviour that every optimizer shares with Keras's: one suite over the list in ``every.py``."""

import functools
import inspect
import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import mirrored

from tests.optimizers.common import at
from tests.optimizers.every import EVERY
from tests.optimizers.problems import PROBLEMS, descend, quadratic
from tests.strategy import models
from tests.strategy.models import BATCH, EPOCHS, STEPS, classifier
from tfscale import ScaleStrategy

DEVICES = ["CPU:0", "CPU:1"]
BASE = {
    "name": "mine",
    "use_ema": True,
    "ema_momentum": 0.5,
    "ema_overwrite_frequency": 7,
    "global_clipnorm": 0.25,
    "loss_scale_factor": 4.0,
    "gradient_accumulation_steps": 3,
}


@pytest.fixture(params=EVERY, ids=lambda entry: entry.name)
def entry(request):
    return request.param


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.__name__)
def test_it_learns(entry, problem):
    """Less than a hundredth of the distance to the least loss remains."""
    steps, made = 300, problem()
    rate = keras.optimizers.schedules.PolynomialDecay(entry.rate, steps, 0.0)
    losses = descend(made, entry.make(learning_rate=rate), steps)
    assert losses[-1] - made.least <= 0.01 * (losses[0] - made.least)


# ------------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_variables_of_any_float_are_trained_with_exact_state(entry, dtype):
    """The loss is that of float32, but for the rounding of the variable."""
    losses = {}
    for each in ("float32", dtype):
        optimizer = entry.make(learning_rate=entry.rate / 4)
        losses[each] = descend(quadratic(each), optimizer, 20)
        exact = "float64" if each == "float64" else "float32"
        assert {v.dtype for v in optimizer.variables[1:]} <= {exact, "float32"}
    assert losses[dtype][-1] < 0.5 * losses[dtype][0]
    tolerance = {"float16": 2e-2, "bfloat16": 1e-1, "float64": 1e-4}[dtype]
    np.testing.assert_allclose(losses[dtype], losses["float32"], rtol=tolerance, atol=0.1)


# ----------------------------------------------------------------- serialization


def arguments(entry):
    return [name for name in inspect.signature(entry.kind).parameters if name != "base"]


def test_every_argument_survives(entry):
    """Each with a value that is not the default, through JSON."""
    given = {"learning_rate": 0.0625, **entry.other, **BASE}
    assert set(arguments(entry)) <= set(given), "every.py lacks a value"
    defaults = entry.kind().get_config()
    config = json.loads(json.dumps(entry.kind(**given).get_config()))
    again = entry.kind.from_config(config).get_config()
    for name, value in given.items():
        assert config[name] == again[name] == value, name
        assert value != defaults[name], f"{name}: the default says nothing"


def test_it_is_registered_with_its_schedule(entry):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 20)
    saved = keras.saving.serialize_keras_object(entry.make(learning_rate=schedule))
    again = keras.saving.deserialize_keras_object(json.loads(json.dumps(saved)))
    assert saved["registered_name"] == f"tfscale>{entry.kind.__name__}"
    assert type(again) is entry.kind
    assert again._learning_rate.get_config() == schedule.get_config()


def fit(model, data=None, **how):
    x, y = data or models.numbers(STEPS * BATCH)
    settings = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0, **how}
    return model.fit(x, y, **settings).history


def small(entry, **arguments):
    """Return a function that makes the optimizer, with settings to compare results."""
    return functools.partial(entry.make, learning_rate=entry.rate / 20, **entry.calm, **arguments)


def model_of(entry, seed=1, build=classifier, **how):
    keras.utils.set_random_seed(seed)
    return build(small(entry, weight_decay=0.01), **how)()


def assert_same_bits(one, other):
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def state(model):
    return model.get_weights() + [v.numpy() for v in model.optimizer.variables]


@pytest.mark.one_in(3)
def test_saved_and_loaded_it_goes_on_as_if_nothing_had_been(entry, tmp_path):
    model = model_of(entry)
    fit(model, epochs=1)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))

    whole = keras.models.load_model(tmp_path / "model.keras")
    weights, checked = model_of(entry, seed=2), model_of(entry, seed=3)
    for other in (weights, checked):
        other.optimizer.build(other.trainable_variables)
    weights.load_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=checked, optimizer=checked.optimizer).read(path).assert_consumed()

    for other in (whole, weights, checked):
        assert_same_bits(state(other), state(model))
    fit(model, epochs=1)
    fit(whole, epochs=1)
    assert_same_bits(state(whole), state(model))


# -------------------------------------------------------- what Keras does around


def test_sparse_gradients_are_the_dense_ones(entry):
    """Rows that come twice are summed, and rows that do not come move on by their momentum."""
    rng = np.random.default_rng(4)
    table, ids = rng.standard_normal((9, 4)), rng.integers(0, 6, (5, 8))
    assert max(np.bincount(ids[0])) > 1
    sparse = _trained_table(entry, table, ids, tf.gather)
    dense = _trained_table(entry, table, ids, lambda w, row: tf.one_hot(row, 9) @ w)
    np.testing.assert_allclose(sparse, dense, rtol=0, atol=1e-6)


def _trained_table(entry, table, ids, look_up):
    w = at("embeddings", table)
    optimizer = small(entry, clipnorm=0.5, loss_scale_factor=2.0)()

    @tf.function
    def step(row):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(look_up(w.value, row) ** 3))
        (gradient,) = tape.gradient(loss, [w.value])
        optimizer.apply([gradient], [w])
        return isinstance(gradient, tf.IndexedSlices)

    is_sparse = [bool(step(tf.constant(row))) for row in ids]
    assert is_sparse == [look_up is tf.gather] * len(ids)
    return w.numpy()


@pytest.mark.parametrize("clip", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_it_gets_clipped_gradients(entry, clip):
    problem, limit = quadratic(), 0.125
    optimizer = entry.make(learning_rate=entry.rate, **{clip: limit})
    optimizer.build(problem.variables)
    original, got = optimizer.update_step, []

    def update_step(gradient, variable, learning_rate):
        got.append(tf.nest.flatten(gradient)[0])  # some hand on more with it
        return original(gradient, variable, learning_rate)

    optimizer.update_step = update_step

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = problem.loss()
        gradients = tape.gradient(loss, problem.variables)
        optimizer.apply(gradients, problem.variables)
        return gradients[0], got[0]

    whole, clipped = (g.numpy() for g in step())
    scale = limit / np.linalg.norm(whole)
    expected = np.clip(whole, -limit, limit) if clip == "clipvalue" else whole * scale
    assert scale < 1
    np.testing.assert_allclose(clipped, expected, rtol=1e-5)


def test_averaged_weights_are_the_average(entry):
    problem = quadratic()
    optimizer = small(entry, use_ema=True, ema_momentum=0.75)()
    average, (w,) = None, problem.variables
    for _ in range(4):
        descend(problem, optimizer, 1)
        average = w.numpy() if average is None else 0.75 * average + 0.25 * w.numpy()
    optimizer.finalize_variable_values(problem.variables)
    np.testing.assert_allclose(w, average, rtol=1e-6)


@pytest.mark.one_in(3)
def test_two_halves_accumulated_are_the_whole(entry):
    """Weights that are the same after each window, and that do not move within one."""
    x, y = models.numbers(4 * BATCH)
    ended = []
    for parts in (1, 2):
        model = model_of(entry)
        if parts > 1:
            model.compile(
                small(entry, weight_decay=0.01, gradient_accumulation_steps=parts)(),
                models.cross_entropy(),
            )
        fit(model, (x, y), batch_size=BATCH // parts, epochs=1)
        ended.append(model.get_weights())
    for one, other in zip(*ended, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


# --------------------------------------------------------------- mixed precision


@pytest.mark.one_in(6)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_in_mixed_precision_it_learns_as_in_float32(entry, policy):
    mixed = fit(model_of(entry, build=functools.partial(_under, policy)))["loss"]
    assert mixed[-1] < mixed[0]
    np.testing.assert_allclose(mixed, on_one_device(entry.name).losses, rtol=1e-2)


@pytest.mark.one_in(3)
def test_a_model_of_bfloat16_learns(entry):
    """Learning differs from float32: its steps are of the size of a weight's rounding."""
    model = model_of(entry, build=functools.partial(_under, "bfloat16"))
    losses = fit(model)["loss"]
    assert "bfloat16" in {w.dtype for w in model.trainable_weights}
    assert "bfloat16" not in {v.dtype for v in model.optimizer.variables}
    assert losses[-1] < losses[0]


def _under(policy, optimizer, **how):
    return models.under(policy, classifier(optimizer, **how))


@pytest.mark.one_in(3)
def test_an_overflow_is_no_step(entry):
    """One batch of each epoch overflows; its step is not counted, and NaN stays away."""
    model = model_of(entry, build=functools.partial(_under, "mixed_float16"))
    fit(model, models.overflowing())
    assert int(model.optimizer.iterations) == EPOCHS * (STEPS - 1)
    assert all(np.all(np.isfinite(w)) for w in state(model))


# -------------------------------------------------------------- where it is run


@functools.cache
def on_one_device(entry_name):
    (entry,) = [each for each in EVERY if each.name == entry_name]
    model = model_of(entry)
    losses = fit(model)["loss"]
    return SimpleNamespace(losses=losses, state=state(model))


def assert_as_on_one_device(entry, model):
    for mine, one in zip(state(model), on_one_device(entry.name).state, strict=True):
        np.testing.assert_allclose(mine, one, rtol=0, atol=1e-6)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("how", [{"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_compiled_or_eager_it_is_the_same(entry, how):
    model = model_of(entry, **how)
    fit(model)
    assert_as_on_one_device(entry, model)


@functools.cache
def strategies():
    return {
        "scale": ScaleStrategy("ring", devices=DEVICES),
        "mirrored": mirrored(),
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("strategy", ["scale", "mirrored"])
def test_two_replicas_are_one_device(entry, strategy):
    """More of that, for four replicas and several workers, is in tests/strategy/cases.py."""
    with strategies()[strategy].scope():
        model = model_of(entry)
    fit(model)
    assert_as_on_one_device(entry, model)
