"""Values of schedules, alone and as Keras and TensorFlow use them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfscale import schedules

EVERY = [
    schedules.Constant(0.4, warmup=8),
    schedules.Drops(0.4, at=[20, 40.5], factor=0.5, warmup=7.5, start=0.1),
    schedules.Polynomial(0.4, end=60, power=2, warmup=8, final=0.01),
    schedules.Polynomial(0.4, end=60, begin=0, warmup=8),
    schedules.Cosine(0.4, end=60, warmup=8, final=0.01),
    schedules.InverseSquareRoot(0.4, warmup=8),
]
every = pytest.mark.parametrize("schedule", EVERY, ids=repr)
STEPS = np.arange(80)


def by_hand(schedule, t):
    """The rate from the formulas of the docstrings, in plain Python."""
    if t < schedule.warmup:
        return schedule.start + (schedule.rate - schedule.start) * t / schedule.warmup
    match schedule:
        case schedules.Constant():
            return schedule.rate
        case schedules.Drops():
            return schedule.rate * schedule.factor ** sum(drop <= t for drop in schedule.at)
        case schedules.InverseSquareRoot():
            return schedule.rate * (schedule.warmup / t) ** 0.5
    begin = schedule.warmup if schedule.begin is None else schedule.begin
    done = min((t - begin) / (schedule.end - begin), 1)
    is_cosine = isinstance(schedule, schedules.Cosine)
    share = (1 + np.cos(np.pi * done)) / 2 if is_cosine else (1 - done) ** schedule.power
    return schedule.final + (schedule.rate - schedule.final) * share


@every
def test_rates_are_those_of_the_formulas(schedule):
    expected = [by_hand(schedule, int(step)) for step in STEPS]
    np.testing.assert_allclose([float(schedule(step)) for step in STEPS], expected, rtol=1e-7)


@every
def test_a_graph_and_xla_and_a_vector_say_the_same(schedule):
    alone = np.array([float(schedule(step)) for step in STEPS], np.float32)
    variable = keras.Variable(0, dtype="int64")
    for compiled in (tf.function(schedule), tf.function(schedule, jit_compile=True)):
        found = []
        for step in STEPS:
            variable.assign(step)
            found.append(float(compiled(variable.value)))
        np.testing.assert_allclose(found, alone, rtol=1e-6)
    np.testing.assert_array_equal(schedule(tf.constant(STEPS)), alone)
    assert schedule(3).dtype == tf.float32


@every
def test_keras_writes_and_reads_it(schedule):
    written = keras.optimizers.schedules.serialize(schedule)
    again = keras.optimizers.schedules.deserialize(written)
    assert type(again) is type(schedule)
    assert again.get_config() == schedule.get_config()
    in_an_optimizer = keras.optimizers.SGD.from_config(keras.optimizers.SGD(schedule).get_config())
    assert in_an_optimizer._learning_rate.get_config() == schedule.get_config()


@every
def test_epochs_become_steps(schedule):
    """Fractions of epochs too."""
    in_epochs = type(schedule)(**{**schedule.get_config(), "unit": "epochs"})
    in_steps = in_epochs.in_steps(2.5)
    assert in_steps.unit == "steps"
    assert in_steps.in_steps(7) is in_steps
    np.testing.assert_allclose(in_steps(5 * STEPS), schedule(2 * STEPS), rtol=1e-6)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4), ("square root", 2)])
def test_a_rate_follows_the_batch(rule, factor):
    schedule = schedules.Cosine(
        0.1, end=9, final=0.01, start=0.1, warmup=2, base_batch=256, scaling=rule
    )
    scaled = schedule.for_batch(1024)
    assert scaled.rate == pytest.approx(0.1 * factor)
    assert scaled.final == pytest.approx(0.01 * factor)
    assert scaled.start == 0.1
    assert scaled.for_batch(7) is scaled


def test_a_warm_up_never_begins_above_its_end():
    """The recipe for 8192 on one small device."""
    schedule = schedules.Constant(0.1, start=0.1, warmup=10, base_batch=256).for_batch(32)
    assert schedule(tf.range(12)).numpy() == pytest.approx(0.0125)


def test_a_late_step_of_a_long_training_keeps_its_digits():
    schedule = schedules.Polynomial(1.0, end=10**7, power=2)
    assert float(schedule(10**7 - 1)) == pytest.approx(1e-14, rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (schedules.Constant(1.0, warmup=5, unit="epochs"), r"counts epochs.*in_steps\("),
        (schedules.Constant(1.0, base_batch=256), r"for batches of 256.*for_batch\("),
    ],
)
def test_an_open_definition_is_no_schedule_yet(schedule, told):
    with pytest.raises(ValueError, match=told):
        schedule(0)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: schedules.Constant(0.0), "rate is a number, more than 0; got 0.0"),
        (lambda: schedules.Constant(1.0, warmup=-1), "warmup is .* 0 or more; got -1"),
        (lambda: schedules.Constant(1.0, start=-0.1), "start is .* 0 or more; got -0.1"),
        (lambda: schedules.Constant(1.0, unit="epoch"), "Did you mean 'epochs'"),
        (
            lambda: schedules.Constant(1.0, scaling="cubic"),
            "scaling is 'linear' or 'square root'; got 'cubic'",
        ),
        (
            lambda: schedules.Constant(1.0, base_batch=0),
            "base_batch is a number of samples, 1 or more; got 0",
        ),
        (lambda: schedules.Drops(1.0, at=[]), r"increasing times.*got \[\]"),
        (lambda: schedules.Drops(1.0, at=[30, 20]), r"increasing times.*got \[30, 20\]"),
        (lambda: schedules.Drops(1.0, at=[3], warmup=5), r"none before warmup=5; got \[3\]"),
        (lambda: schedules.Cosine(1.0, end=5, warmup=6), "begin=6, warmup=6, end=5"),
        (lambda: schedules.Polynomial(1.0, end=5, begin=5), "begin=5, warmup=0, end=5"),
        (
            lambda: schedules.Polynomial(1.0, end=5, power=0),
            "power is a number, more than 0; got 0",
        ),
        (lambda: schedules.InverseSquareRoot(1.0), "warmup is .*for this schedule.*; got 0"),
        (lambda: schedules.Constant(1.0, unit="epochs").in_steps(0), "steps_per_epoch .*; got 0"),
        (lambda: schedules.linear_scaling(1.0, 256, 0), "batch is a number of samples, .*; got 0"),
    ],
)
def test_a_refusal_says_what_was_received(make, told):
    with pytest.raises(ValueError, match=told):
        make()
