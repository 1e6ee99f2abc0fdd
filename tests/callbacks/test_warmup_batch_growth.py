"""Batches that grow, in real trainings."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.callbacks.warmups import Seen, compiled, fit, momentum, numbers, rates
from tfscale import schedules
from tfscale.callbacks import BatchGrowth, Warmup

SIZES = {0: 8, 3: 12, 8: 24}
ROWS, EPOCHS, STEPS = 48, 4, 3  # batches of 8, 12, 24 and 24 at the ends of the epochs


def samples():
    return tf.data.Dataset.from_tensor_slices(numbers(ROWS // 8))


def grow(model, growth, *callbacks, epochs=EPOCHS, **how):
    data = growth.batches(samples())
    how = {"epochs": epochs, "steps_per_epoch": STEPS, "verbose": 0, **how}
    return model.fit(data, callbacks=[growth, *callbacks], **how)


def by_hand(model, steps, first=0):
    """Train as the rule says, without the callback: each size begins with the first row."""
    x, y = numbers(ROWS // 8)
    begin, size = 0, None
    for step in range(steps):
        if step in SIZES or step == first:
            begin, size = 0, BatchGrowth(SIZES).size(step)
        rows = np.arange(begin, begin + size) % ROWS
        begin += size
        if step >= first:
            model.train_on_batch(x[rows], y[rows])
    return model


def assert_same_weights(model, other):
    for mine, expected in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6)


def gentle(**how):
    return momentum(0.02, **how)


@pytest.mark.parametrize("how", [{}, {"steps_per_execution": 3}])
def test_each_step_has_its_batch(how):
    model = compiled(gentle(), **how)
    history = grow(model, BatchGrowth(SIZES)).history
    assert history["batch_size"] == [8, 12, 24, 24]
    assert int(model.optimizer.iterations) == EPOCHS * STEPS
    assert_same_weights(model, by_hand(compiled(gentle()), EPOCHS * STEPS))


def test_an_unbuilt_model_has_the_first_batch_first():
    growth, sizes = BatchGrowth({0: 8, 1: 12}), []

    class Look(keras.layers.Layer):
        def call(self, x):
            tf.py_function(lambda n: sizes.append(int(n)), [tf.shape(x)[0]], [])
            return x

    model = keras.Sequential([Look(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    grow(model, growth, epochs=1)
    assert sizes[-STEPS:] == [8, 12, 12]


class StopAfter(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self._steps = steps

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self._steps:
            raise InterruptedError


@pytest.mark.parametrize("growth_first", [True, False])
def test_a_resumed_training_goes_on_with_the_batch_of_its_step(tmp_path, growth_first):
    """Saved in the middle of the second epoch, which Keras then begins anew."""

    def run(model, *more):
        growth = BatchGrowth(SIZES)
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1)
        pair = [growth, backup] if growth_first else [backup, growth]
        data = growth.batches(samples())
        how = {"epochs": EPOCHS, "steps_per_epoch": STEPS, "verbose": 0}
        return model.fit(data, callbacks=[*pair, *more], **how).history

    with pytest.raises(InterruptedError):
        run(compiled(gentle()), StopAfter(5))
    resumed = compiled(gentle())
    history = run(resumed)
    assert history["batch_size"] == [12, 24, 24]
    expected = by_hand(by_hand(compiled(gentle()), 5), 5 + 3 * STEPS, first=5)
    assert_same_weights(resumed, expected)


def test_accumulation_counts_batches():
    growth = BatchGrowth(SIZES)
    history = grow(compiled(gentle(gradient_accumulation_steps=3)), growth).history
    assert history["batch_size"] == [8, 12, 24, 24]


def test_passes_are_shuffled_each_in_its_own_way():
    data = BatchGrowth({0: ROWS}).batches(tf.data.Dataset.range(ROWS).shuffle(ROWS, seed=1))
    first, second = itertools.islice(data.as_numpy_iterator(), 2)
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert list(first) != list(second)


def test_a_rate_in_epochs_goes_with_it():
    """All epochs of fit have the same number of steps."""
    seen, hill = Seen(), schedules.Cosine(0.02, end=4, warmup=1.5, unit="epochs")
    grow(compiled(momentum()), BatchGrowth(SIZES), Warmup(hill), seen)
    assert seen.rates == rates(hill.in_steps(STEPS), range(EPOCHS * STEPS))


def test_drops_become_growth():
    """After Smith et al. 2018, section 5.1: a rate that falls by 5 at the epochs 60, 120 and 160
    of 200 on CIFAR-10, with a batch of 128, becomes a batch that grows by 5."""
    growth = BatchGrowth.by_epochs({0: 128, 60: 640, 120: 3200, 160: 16000}, samples=50000)
    lengths = [60 * 50000 / 128, 60 * 50000 / 640, 40 * 50000 / 3200]
    begins = np.cumsum([0, *np.round(lengths)]).astype(int)
    assert growth.sizes == dict(zip(begins.tolist(), [128, 640, 3200, 16000], strict=True))
    updates = growth.steps(200 * 50000)
    assert updates == begins[-1] + 40 * 50000 // 16000
    assert updates < 200 * 50000 / 128 / 2  # fewer than half as many


@pytest.mark.parametrize("seen", [1, 8, 24, 25, 84, 85, 1000])
def test_steps_are_as_many_as_it_takes(seen):
    growth = BatchGrowth(SIZES)
    steps = growth.steps(seen)
    assert sum(growth.size(step) for step in range(steps)) >= seen
    assert sum(growth.size(step) for step in range(steps - 1)) < seen


def test_epochs_without_an_end_are_refused():
    with pytest.raises(ValueError, match="has no end.*Give fit steps_per_epoch"):
        grow(compiled(gentle()), BatchGrowth(SIZES), steps_per_epoch=None)


def test_other_data_is_noticed():
    with pytest.raises(RuntimeError, match=r"has not read the data.*growth.batches\(samples\)"):
        fit(compiled(gentle()), [BatchGrowth(SIZES)])


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        *((sizes, r"from step 0 on, .*got \{") for sizes in ({}, {1: 8})),
        ({0: 0}, "a value of sizes is a batch size, 1 or more; got 0"),
        ({0: 8, -1: 4}, "a key of sizes is a number of steps, 0 or more; got -1"),
    ],
)
def test_sizes_begin_with_the_first_step(sizes, said):
    with pytest.raises(ValueError, match=said):
        BatchGrowth(sizes)
