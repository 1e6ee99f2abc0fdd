"""Warmup in real trainings on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.callbacks.warmups import (
    BATCH,
    HILL,
    RATE,
    STEPS,
    Seen,
    bits,
    compiled,
    fit,
    momentum,
    numbers,
    rates,
)
from tfscale import schedules
from tfscale.callbacks import Warmup

CLOSED = HILL.in_steps(STEPS)
COMPILED = float(np.float32(RATE))  # as an optimizer's variable holds it

# ---- one definition, both ways


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("optimizer", "how"),
    [
        (momentum, {}),
        (lambda rate: keras.optimizers.Adam(rate), {}),
        (lambda rate: momentum(rate, gradient_accumulation_steps=4), {}),  # not in an epoch
        (lambda rate: momentum(rate, weight_decay=0.01, use_ema=True), {}),
        (momentum, {"jit_compile": True}),
        (momentum, {"run_eagerly": True}),
    ],
    ids=["sgd", "adam", "accumulate", "decay", "jit", "eager"],
)
def test_the_callback_trains_as_the_schedule_does(optimizer, how):
    by_callback, by_schedule = compiled(optimizer(RATE), **how), compiled(optimizer(CLOSED), **how)
    fit(by_callback, [Warmup(HILL)])
    fit(by_schedule)
    assert bits(by_callback) == bits(by_schedule)


def test_each_step_has_its_own_rate():
    """Seen from outside: with a gradient of 1, a weight moves by the rate."""
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(RATE), lambda y, out: out)
    path = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: path.append(float(model.get_weights()[0].item()))
    )
    model.layers[0].kernel.assign([[0.0]])
    ones = np.ones([STEPS * BATCH, 1], np.float32)
    model.fit(ones, ones, batch_size=BATCH, epochs=4, verbose=0, callbacks=[Warmup(HILL), look])
    moved = -np.diff([0.0, *path])
    np.testing.assert_allclose(moved, CLOSED(tf.range(4 * STEPS)), atol=1e-6)


@pytest.mark.slow
def test_a_schedule_of_keras_serves_too():
    keras_own = keras.optimizers.schedules.CosineDecay(
        0.0, decay_steps=20, warmup_target=RATE, warmup_steps=5
    )
    by_callback, by_schedule = compiled(momentum()), compiled(momentum(keras_own))
    fit(by_callback, [Warmup(keras_own)])
    fit(by_schedule)
    assert bits(by_callback) == bits(by_schedule)


@pytest.mark.parametrize("length", [{"epochs": 1.5}, {"steps": 9}])
def test_a_short_form_leads_to_the_compiled_rate(length):
    seen = Seen()
    fit(compiled(momentum()), [Warmup(**length, start=0.1), seen], epochs=2)
    assert seen.rates == rates(schedules.Constant(COMPILED, warmup=9, start=0.1), range(2 * STEPS))


def test_half_precision_has_a_loss_scale_around_the_rate():
    model, seen = compiled(keras.optimizers.LossScaleOptimizer(momentum())), Seen()
    fit(model, [Warmup(HILL), seen])
    assert seen.rates
    assert seen.rates == {step: float(CLOSED(step)) for step in seen.rates}


# ---- epochs and batches


def test_accumulated_batches_count_for_the_batch():
    """Windows have one rate, that of their last batch, where the update is."""
    recipe = schedules.Constant(0.1, start=0.1, warmup=2, unit="epochs", base_batch=BATCH)
    seen = Seen()
    model = compiled(momentum(gradient_accumulation_steps=3))
    fit(model, [Warmup(recipe, batch=BATCH), seen], epochs=3)
    expected = recipe.for_batch(3 * BATCH).in_steps(STEPS)
    assert expected.rate == pytest.approx(0.3)
    ends = {step: step // 3 * 3 + 2 for step in range(3 * STEPS)}
    assert seen.rates == {step: float(expected(end)) for step, end in ends.items()}


@pytest.mark.parametrize("size", [{"batch": 4 * BATCH}, {"batch_per_replica": 4 * BATCH}])
def test_one_replica_has_the_whole_batch(size):
    recipe = schedules.Constant(0.1, base_batch=BATCH, scaling="square root")
    seen = Seen()
    fit(compiled(momentum()), [Warmup(recipe, **size), seen], epochs=1)
    assert list(seen.rates.values()) == pytest.approx([0.2] * STEPS)


def endless():
    x, y = numbers()
    while True:
        yield x[:BATCH], y[:BATCH]


def test_a_generator_needs_steps_per_epoch():
    seen, model = Seen(), compiled(momentum())
    settings = {"epochs": 2, "steps_per_epoch": STEPS, "verbose": 0}
    model.fit(endless(), callbacks=[Warmup(HILL), seen], **settings)
    assert seen.rates == rates(CLOSED, range(2 * STEPS))


def test_epochs_of_unknown_length_are_refused():
    data = tf.data.Dataset.from_tensor_slices(numbers()).batch(BATCH).filter(lambda *_: True)
    with pytest.raises(ValueError, match="doesn't know how many steps.*steps_per_epoch"):
        compiled(momentum()).fit(data, callbacks=[Warmup(epochs=1)], verbose=0)


def test_steps_are_counted_without_knowing_epochs():
    seen = Seen()
    model = compiled(momentum())
    model.fit(endless(), steps_per_epoch=4, verbose=0, callbacks=[Warmup(CLOSED), seen])
    assert seen.rates == rates(CLOSED, range(4))


# ---- steps_per_execution


def test_an_execution_has_the_rate_of_its_first_step():
    seen = Seen()
    model = compiled(momentum(), steps_per_execution=4)
    fit(model, [Warmup(HILL), seen], epochs=2)  # of 6 steps: 4 and 2
    first_and_last = [(0, 3), (4, 5), (6, 9), (10, 11)]
    assert seen.rates == {last: float(CLOSED(first)) for first, last in first_and_last}


def test_the_schedule_itself_is_exact_in_an_execution():
    whole, single = compiled(momentum(CLOSED), steps_per_execution=3), compiled(momentum(CLOSED))
    fit(whole)
    fit(single)
    assert bits(whole) == bits(single)


# ---- resuming in the middle of the warm-up


class StopAfter(keras.callbacks.Callback):
    """Interrupts a training when the optimizer has made some steps."""

    def __init__(self, steps):
        super().__init__()
        self._steps = steps

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self._steps:
            raise InterruptedError


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("form", "warmup_first"), [({"schedule": HILL}, True), ({"epochs": 2.5}, False)]
)
def test_backup_and_restore(tmp_path, form, warmup_first):
    """Interrupted in the middle of an epoch: Keras begins that anew, the rate goes on."""

    def callbacks(*more):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=2)
        pair = [Warmup(**form), backup]
        return [*(pair if warmup_first else pair[::-1]), *more]

    with pytest.raises(InterruptedError):
        fit(compiled(momentum()), callbacks(StopAfter(STEPS + 2)))
    seen, resumed = Seen(), compiled(momentum())
    fit(resumed, callbacks(seen), epochs=3)
    expected = (
        HILL if "schedule" in form else schedules.Constant(COMPILED, warmup=2.5, unit="epochs")
    )
    assert list(seen.rates) == list(range(STEPS + 2, 3 * STEPS + 2))
    assert seen.rates == rates(expected.in_steps(STEPS), seen.rates)


def test_an_epoch_resumed_is_bit_for_bit_an_epoch_never_left(tmp_path):
    def correcting():
        return Warmup(HILL, momentum_correction=True)

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    with pytest.raises(InterruptedError):
        fit(compiled(momentum()), [correcting(), backup(), StopAfter(STEPS + 2)])
    resumed, whole = compiled(momentum()), compiled(momentum())
    fit(resumed, [correcting(), backup()])
    fit(whole, [correcting()])
    assert bits(resumed) == bits(whole)


@pytest.mark.slow
def test_model_checkpoint(tmp_path):
    """A whole model, loaded and trained on."""
    path, whole = tmp_path / "model.keras", compiled(momentum())
    saver = keras.callbacks.ModelCheckpoint(path)
    first = compiled(momentum())
    fit(first, [Warmup(HILL), saver], epochs=1)
    loaded = keras.models.load_model(path)
    fit(loaded, [Warmup(HILL)], initial_epoch=1)
    fit(whole, [Warmup(HILL)])
    assert bits(loaded) == bits(whole)


def test_weights_alone_hold_the_step(tmp_path):
    first, path = compiled(momentum()), tmp_path / "model.weights.h5"
    fit(first, [Warmup(HILL)], epochs=1)
    first.save_weights(path)
    again, seen = compiled(momentum()), Seen()
    again.optimizer.build(again.trainable_variables)  # else Keras leaves its state out
    again.load_weights(path)
    fit(again, [Warmup(HILL), seen], epochs=2, initial_epoch=1)
    assert seen.rates == rates(CLOSED, range(STEPS, 2 * STEPS))


def test_a_short_form_does_not_guess_where_a_loaded_model_was_going(tmp_path):
    model = compiled(momentum())
    fit(model, [Warmup(epochs=2.5)], epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    with pytest.raises(ValueError, match=r"made 6 updates.*Constant\(RATE, warmup=2.5"):
        fit(loaded, [Warmup(epochs=2.5)])


def test_a_second_fit_goes_on():
    model, warm, seen = compiled(momentum()), Warmup(epochs=2.5), Seen()
    fit(model, [warm, seen], epochs=1)
    fit(model, [warm, seen], epochs=2, steps=3)  # an epoch stays what it was
    expected = schedules.Constant(COMPILED, warmup=2.5 * STEPS)
    assert seen.rates == rates(expected, range(STEPS + 6))


def test_a_compiled_model_is_saved_with_its_schedule(tmp_path):
    model = compiled(momentum(CLOSED))
    fit(model, epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer._learning_rate.get_config() == CLOSED.get_config()
    fit(model, epochs=1)
    fit(loaded, epochs=1)
    assert bits(loaded) == bits(model)


# ---- the log


def test_the_rate_is_in_the_history_and_in_the_progress_bar(capsys):
    history = fit(compiled(momentum()), [Warmup(HILL)], verbose=2).history
    last = [float(CLOSED(STEPS * epoch - 1)) for epoch in range(1, 5)]
    assert history["learning_rate"] == last
    assert f"learning_rate: {last[0]:.4f}" in capsys.readouterr().out


def test_the_rate_is_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    board = keras.callbacks.TensorBoard(tmp_path, update_freq=1)
    fit(compiled(momentum()), [Warmup(HILL), board])
    logged = {"epoch_learning_rate": [], "batch_learning_rate": []}
    for path in tmp_path.glob("train/*tfevents*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                logged.setdefault(value.tag, []).append(tf.make_ndarray(value.tensor).item())
    assert logged["epoch_learning_rate"] == [float(CLOSED(STEPS * e - 1)) for e in range(1, 5)]
    assert logged["batch_learning_rate"] == [float(CLOSED(step)) for step in range(4 * STEPS)]


# ---- refusals


def test_a_second_master_is_told():
    class Other(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.125

    with pytest.raises(RuntimeError, match=r"and now it is 0\.125: something else"):
        fit(compiled(momentum()), [Warmup(HILL), Other()])


def test_an_optimizer_with_a_schedule_is_left_alone():
    with pytest.raises(ValueError, match=r"has Cosine\(.*Compile with a number"):
        fit(compiled(momentum(CLOSED)), [Warmup(HILL)])


def test_several_optimizers_have_no_one_rate():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    several = keras.optimizers.OptimizerMap(keras.optimizers.SGD(RATE))
    with pytest.raises(ValueError, match="MultiOptimizer has one for each"):
        fit(compiled(keras.optimizers.MultiOptimizer(several)), [Warmup(HILL)])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "one of the three; got schedule=None, epochs=None, steps=None"),
        ({"epochs": 5, "steps": 100}, "epochs=5, steps=100"),
        ({"schedule": CLOSED, "start": 0.1}, "start=0.1 goes with epochs or steps"),
        ({"epochs": 5, "batch": 64, "batch_per_replica": 8}, "batch=64, batch_per_replica=8"),
    ],
)
def test_arguments_that_contradict_each_other(arguments, told):
    with pytest.raises(ValueError, match=told):
        Warmup(**arguments)


def test_a_batch_needs_a_base_batch():
    with pytest.raises(ValueError, match="does not say for which batch"):
        fit(compiled(momentum()), [Warmup(epochs=1, batch=64)])


def test_a_base_batch_needs_a_batch():
    recipe = schedules.Constant(0.1, base_batch=256)
    with pytest.raises(ValueError, match="for batches of 256.*batch_per_replica"):
        fit(compiled(momentum()), [Warmup(recipe)])
