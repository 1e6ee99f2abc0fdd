"""Learning rates and batches on two replicas of one process: as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.callbacks.warmups import BATCH, HILL, STEPS, Seen, compiled, fit, momentum, numbers
from tfscale import schedules
from tfscale.callbacks import BatchGrowth, Warmup


@pytest.fixture(scope="module")
def strategy():
    return tfscale.ScaleStrategy(algorithm="ring", devices=["CPU:0", "CPU:1"])


def on(strategy, optimizer, **how):
    with strategy.scope():
        return compiled(optimizer(), **how)


def assert_same(model, alone):
    for mine, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6)
    state = zip(model.optimizer.variables, alone.optimizer.variables, strict=False)
    for mine, expected in state:
        np.testing.assert_allclose(mine.numpy(), expected.numpy(), rtol=0, atol=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("correction", "window"), [(True, None), (False, 3)])
def test_warmup(strategy, correction, window):
    def optimizer():
        return momentum(0.04, gradient_accumulation_steps=window)

    gentle = schedules.Cosine(0.04, end=5, warmup=2.5, start=0.01, unit="epochs")
    model, alone = on(strategy, optimizer), compiled(optimizer())
    for one in (model, alone):
        fit(one, [Warmup(gentle, momentum_correction=correction)])
    assert_same(model, alone)


def test_all_replicas_have_the_rate(strategy):
    model = on(strategy, momentum)
    fit(model, [Warmup(HILL)], epochs=1)
    copies = strategy.experimental_local_results(model.optimizer._learning_rate.value)
    assert {float(copy) for copy in copies} == {float(HILL.in_steps(STEPS)(STEPS - 1))}


@pytest.mark.slow
def test_the_schedule_alone(strategy):
    def optimizer():
        return momentum(HILL.in_steps(STEPS))

    by_schedule, by_callback = on(strategy, optimizer), on(strategy, momentum)
    fit(by_schedule)
    fit(by_callback, [Warmup(HILL)])
    for mine, expected in zip(by_schedule.get_weights(), by_callback.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_the_global_batch_is_known_from_the_replicas(strategy):
    recipe = schedules.Constant(0.1, base_batch=BATCH // 2)
    seen = Seen()
    fit(on(strategy, momentum), [Warmup(recipe, batch_per_replica=BATCH // 2), seen], epochs=1)
    assert list(seen.rates.values()) == pytest.approx([0.2] * STEPS)


@pytest.mark.slow
def test_resuming(strategy, tmp_path):
    class StopBefore(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise InterruptedError

    def callbacks(*more):
        return [Warmup(HILL), keras.callbacks.BackupAndRestore(tmp_path / "backup"), *more]

    with pytest.raises(InterruptedError):
        fit(on(strategy, momentum), callbacks(StopBefore()))
    resumed, whole, seen = on(strategy, momentum), on(strategy, momentum), Seen()
    fit(resumed, callbacks(seen))
    fit(whole, [Warmup(HILL)])
    assert list(seen.rates) == list(range(2 * STEPS, 4 * STEPS))
    for mine, expected in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, expected)


def growing(model, sizes):
    growth = BatchGrowth(sizes)
    data = growth.batches(tf.data.Dataset.from_tensor_slices(numbers()))
    return model.fit(data, epochs=4, steps_per_epoch=3, verbose=0, callbacks=[growth])


def test_batches_grow(strategy):
    """Some of them from the end of one pass to the beginning of the next."""
    sizes = {0: 8, 3: 10, 7: 24}

    def optimizer():
        return momentum(0.02)

    model, alone = on(strategy, optimizer), compiled(optimizer())
    for one in (model, alone):
        assert growing(one, sizes).history["batch_size"] == [8, 10, 24, 24]
    assert_same(model, alone)


def test_replicas_get_equal_parts(strategy):
    with pytest.raises(
        ValueError, match=r"a batch of 13 .* by 2 replicas.* multiple of 2, such as 12"
    ):
        growing(on(strategy, momentum), {0: 8, 1: 13})
