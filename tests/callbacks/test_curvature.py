"""Curvature that is measured in real trainings, and batches that grow by it."""

import doctest
import json
import logging
import os
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests import warm
from tests.callbacks.warmups import BATCH, STEPS, compiled, fit, momentum, numbers
from tests.callbacks.workers import curvature as worker
from tests.strategy.features import StopBefore
from tfscale import callbacks, curvature
from tfscale.adversarial import FGSM
from tfscale.callbacks import Adversarial, BatchGrowth, Curvature, Warmup, curvature as module

ROOT = Path(__file__).parents[2]
FULL = pytest.mark.full
SECONDS = 600  # on the busiest machine


@pytest.fixture(scope="module")
def strategy():
    return tfscale.ScaleStrategy(algorithm="ring", devices=["CPU:0", "CPU:1"])


def noisy(**how):
    """Dropout, batch normalization, momentum: all that a measurement could disturb."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input([3]), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", **how)
    return model


def state(model):
    return [np.asarray(v).tobytes() for v in [*model.variables, *model.optimizer.variables]]


# ------------------------------------------------------------------ measuring


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, every",
    [
        ({}, "epoch"),
        pytest.param({"run_eagerly": True}, "epoch", marks=FULL),
        pytest.param({}, 4, marks=FULL),
        pytest.param({"run_eagerly": True}, 4, marks=FULL),
    ],
)
def test_the_training_is_the_same_to_the_bit(how, every):
    x, y = numbers()
    measured = Curvature(x, y, every=every, samples=2)
    model, plain = noisy(**how), noisy(**how)
    fit(model, [measured], epochs=2, shuffle=True)
    fit(plain, epochs=2, shuffle=True)
    assert state(model) == state(plain)
    steps = [STEPS, 2 * STEPS] if every == "epoch" else [4, 8, 12]
    assert [one["step"] for one in measured.measured] == steps


@pytest.mark.slow
def test_the_numbers_are_those_of_the_hessian():
    x, y = numbers()
    model = noisy()
    measured = Curvature(x, y, samples=4, what=("trace", "top", "bottom"), variables="kernel")
    history = fit(model, [measured], epochs=1).history
    hessian = curvature.Hessian(model, x, y, variables="kernel")
    trace = hessian.trace(samples=4)
    found = measured.measured[-1]
    assert found["trace"] == pytest.approx(trace.value, rel=1e-5)
    assert found["trace_error"] == pytest.approx(trace.total.error, rel=1e-4)
    assert found["top"] == pytest.approx(hessian.eigenvalues(top=1).top[0], rel=1e-4)
    assert found["bottom"] == pytest.approx(
        hessian.eigenvalues(top=0, bottom=1).bottom[0], rel=1e-3, abs=1e-4 * found["top"]
    )
    assert history["curvature_trace"] == [found["trace"]]


def test_files_hold_layers_and_a_second_fit_adds_to_them(tmp_path):
    x, y = numbers()
    measured = Curvature(x, y, samples=2, jsonl=tmp_path / "c.jsonl", tensorboard=tmp_path / "tb")
    model = noisy()
    for _ in range(2):
        fit(model, [measured], epochs=1)
    lines = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["start", "curvature"] * 2
    assert [line["step"] for line in lines] == [0, STEPS, STEPS, 2 * STEPS]
    layers = lines[-1]["layers"]
    assert sum(one["value"] for one in layers.values()) == pytest.approx(lines[-1]["trace"])
    tags = set()
    for file in (tmp_path / "tb").iterdir():
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            tags |= {value.tag for value in event.summary.value}
    assert tags == {"curvature/trace", "curvature/trace_error", "curvature/top"}


def diverged():
    model = compiled(keras.optimizers.SGD(0.01))
    model.layers[0].kernel.assign(np.full((3, 4), np.nan))
    return model


def test_a_loss_that_is_not_finite_does_not_end_the_training(caplog):
    measured = Curvature(*numbers(), samples=2)
    with caplog.at_level(logging.WARNING, "tfscale"):
        history = fit(diverged(), [measured], epochs=2).history
    assert np.isnan(history["curvature_trace"]).all() and len(measured.measured) == 2
    assert "measured nothing after step 6: the loss of 'sequential" in caplog.text


@pytest.mark.parametrize(
    "how, message",
    [
        ({"every": "step"}, "every is .*got 'step'"),
        ({"every": 0}, "got 0"),
        ({"what": "top"}, "what is a list of 'trace', 'top', 'bottom'; got 'top'"),
        ({"what": ("middle",)}, r"what\[0\] is 'trace', .*got 'middle'"),
    ],
)
def test_wrong_arguments_of_curvature_are_refused(how, message):
    with pytest.raises(ValueError, match=message):
        Curvature(*numbers(), **how)


# -------------------------------------------------------------------- growing


def growing(**how):
    x, y = numbers()
    how = {"samples": len(x), "patience": 2, **how}
    return BatchGrowth.by_curvature(8, 32, x, y, **how)


def grow(model, growth, *others, epochs=6, **how):
    data = growth.batches(tf.data.Dataset.from_tensor_slices(numbers()))
    how = {"verbose": 0, **how}
    return model.fit(data, epochs=epochs, callbacks=[growth, *others], **how).history


def of_eigenvalues(monkeypatch, values):
    """Let the largest eigenvalue be these, one after the other."""
    given = iter(values)

    class Given:
        def __init__(self, *data, **how):
            pass

        def eigenvalues(self, top):
            return type("Found", (), {"top": [next(given)]})

    monkeypatch.setattr(curvature, "Hessian", Given)


@pytest.mark.parametrize(
    "eigenvalues, patience, sizes",
    [
        ([8, 5, 4, 3, 2.1], 10, [8, 8, 8, 16, 16, 16]),  # half of 8, then of 4
        ([8, 4, 2, 1, 1], 10, [8, 8, 16, 32, 32, 32]),
        ([1, 2, 3, 4, 5], 2, [8, 8, 16, 16, 32, 32]),  # never flatter
        ([8, 4, 3, 2, 1], 2, [8, 8, 16, 16, 32, 32]),  # patience begins anew with each growth
        ([-1, 5, 5, 5, 5], 10, [8] * 6),
    ],
)
def test_the_rule(monkeypatch, eigenvalues, patience, sizes):
    of_eigenvalues(monkeypatch, eigenvalues)
    model, growth = compiled(keras.optimizers.SGD(0.01)), growing(patience=patience)
    history = grow(model, growth)
    assert history["batch_size"] == sizes
    rate = float(model.optimizer.learning_rate)
    assert rate == pytest.approx(0.01 * sizes[-1] / 8)
    assert int(model.optimizer.iterations) == sum(-(-STEPS * BATCH // size) for size in sizes)
    assert growth.share(0.2)(0) == 0.2
    last = growth.share(0.2)(int(model.optimizer.iterations))
    assert last == (0 if sizes[-1] == 32 else pytest.approx(0.2 * 8 / sizes[-1]))


def test_the_samples_are_those_of_full_passes():
    seen = []

    class Look(keras.layers.Layer):
        def call(self, x):
            tf.py_function(lambda x: seen.append(x.numpy()), [x], [])
            return x

    x, y = numbers()
    model = keras.Sequential([Look(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.build((None, 3))
    seen.clear()
    growth = growing(patience=1)
    growth._measure = lambda epoch, step: growth.sizes.update({step: 2 * growth.size(step)})
    data = growth.batches(tf.data.Dataset.from_tensor_slices((x, y)))
    model.fit(data, epochs=2, verbose=0, callbacks=[growth])
    sizes = [8] * 6 + [16] * 3
    assert [len(batch) for batch in seen] == sizes
    np.testing.assert_array_equal(np.concatenate(seen), np.concatenate([x, x]))


@FULL
def test_the_rate_may_stay_and_then_others_set_it():
    model = compiled(keras.optimizers.SGD(0.02))
    history = grow(model, growing(raise_rate=False), keras.callbacks.LearningRateScheduler(
        lambda epoch: 0.02 / (1 + epoch)
    ))  # fmt: skip
    assert history["batch_size"][-1] == 32
    assert float(model.optimizer.learning_rate) == pytest.approx(0.02 / 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "growth_first, stop",
    [
        pytest.param(False, 2, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=FULL) for case in ((True, 2), (True, 3), (False, 3))),
    ],
)
def test_a_resumed_training_goes_on(tmp_path, growth_first, stop):
    """Stopped before the epoch in which the batch grows, and before the next one."""

    def run(model, *more):
        growth = growing(file=tmp_path / "growth.json")
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        x, y = numbers()
        measured = Curvature(x, y, samples=2, jsonl=tmp_path / "lines.jsonl")
        pair = [growth, backup] if growth_first else [backup, growth]
        data = growth.batches(tf.data.Dataset.from_tensor_slices((x, y)))
        both = [*pair, measured, Adversarial(FGSM(0.05), share=growth.share(0.5)), *more]
        return growth, model.fit(data, epochs=6, verbose=0, callbacks=both).history

    def model():
        return compiled(momentum(0.005))

    with pytest.raises(InterruptedError):
        run(model(), StopBefore(stop))
    resumed, whole = model(), model()
    growth, history = run(resumed)
    lines = (tmp_path / "lines.jsonl").read_text().splitlines()
    whole_growth = growing()
    grow(whole, whole_growth, Adversarial(FGSM(0.05), share=whole_growth.share(0.5)))
    assert growth.sizes == whole_growth.sizes
    assert history["batch_size"] == [8, 8, 16, 16, 32, 32][stop:]
    for mine, expected in zip(growth.measures, whole_growth.measures, strict=True):
        assert mine.eigenvalue == pytest.approx(expected.eigenvalue, rel=1e-5)
    for mine, expected in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6)
    assert sum('"curvature"' in line for line in lines) == 6


@FULL
def test_a_second_fit_goes_on():
    model, growth = compiled(keras.optimizers.SGD(0.01)), growing()
    history = grow(model, growth, epochs=4)
    more = grow(model, growth, epochs=8, initial_epoch=4)
    assert history["batch_size"] + more["batch_size"] == [8, 8, 16, 16, 32, 32, 32, 32]


@FULL
def test_two_replicas_train_as_one_device(strategy):
    with strategy.scope():
        model = worker.model()
    found, alone = worker.train(model), worker.train(worker.model())
    assert_same(found, alone)


def assert_same(found, alone):
    assert found["batch_size"] == alone["batch_size"] == [8, 8, 16, 16, 24, 24]
    assert found["rate"] == alone["rate"] == pytest.approx(0.06)
    for name in ("curvature_top", "curvature_trace"):
        np.testing.assert_allclose(found[name], alone[name], rtol=1e-4)
    for mine, expected in zip(found["weights"], alone["weights"], strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6)


@FULL
@pytest.mark.timeout(SECONDS + 60)
def test_two_processes_train_as_one_device(tmp_path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with warm.Workers(
        [worker.__file__, str(tmp_path)], 2, environment={"PYTHONPATH": path}
    ) as group:
        printed = group.wait(SECONDS)
    told = [re.findall(r"^TOLD (.*)$", output, re.MULTILINE) for output in printed]
    assert told[0] == told[1], "workers trained in other ways"
    assert_same(json.loads(told[0][0]), worker.train(worker.model()))
    assert [file.name for file in tmp_path.iterdir()] == ["0"], "the first worker writes"


# ------------------------------------------------------------------- refusals


def test_what_does_not_go_together_is_refused(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(ValueError, match="Warmup and BatchGrowth.by_curvature.*raise_rate=False"):
        grow(compiled(momentum()), growing(), Warmup(steps=3))
    with pytest.raises(ValueError, match='does not record when .*file="growth.json"'):
        grow(compiled(momentum()), growing(), backup)
    with pytest.raises(ValueError, match="was given steps_per_epoch=3: leave it out"):
        grow(compiled(momentum()), growing(), steps_per_epoch=3)
    rate = tfscale.schedules.Cosine(0.1, end=5)
    with pytest.raises(ValueError, match="BatchGrowth.by_curvature sets optimizer.learning_rate"):
        grow(compiled(momentum(rate)), growing())


def test_batches_do_not_grow_by_a_loss_that_is_not_finite():
    with pytest.raises(curvature.NotFiniteError, match="before epoch 2: .* is nan in batch 0"):
        grow(diverged(), growing())


@pytest.mark.slow
def test_another_rate_is_noticed():
    halve = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (1 + epoch))
    with pytest.raises(RuntimeError, match="has left the learning rate at 0.01, and now it is"):
        grow(compiled(keras.optimizers.SGD(0.01)), growing(), halve)


def test_steps_of_which_nothing_is_known_are_refused(tmp_path):
    model = compiled(keras.optimizers.SGD(0.01))
    fit(model, epochs=1)
    with pytest.raises(ValueError, match="has made 6 steps, .*file=... is missing"):
        grow(model, growing())
    with pytest.raises(ValueError, match="growth.json is missing"):
        grow(model, growing(file=tmp_path / "growth.json"))


def test_a_file_of_another_training_is_refused(tmp_path):
    path = tmp_path / "growth.json"
    model = compiled(keras.optimizers.SGD(0.01))
    grow(model, growing(file=path), epochs=2)
    with pytest.raises(ValueError, match="factor: expected 4, as in this training, got 2"):
        grow(model, growing(file=path, factor=4))


def test_replicas_get_equal_parts(strategy):
    with strategy.scope():
        model = compiled(keras.optimizers.SGD(0.01))
    x, y = numbers()
    growth = BatchGrowth.by_curvature(8, 33, x, y, samples=len(x))
    with pytest.raises(ValueError, match="a batch of 33 can't be shared equally by 2 replicas"):
        grow(model, growth)


@pytest.mark.parametrize(
    "how, message",
    [
        ({"factor": 1}, "factor is a whole number, 2 or more; got 1"),
        ({"fall": 0.5}, "fall is a number, 1 or more; got 0.5"),
        ({"patience": 0}, "patience is a number of epochs, 1 or more; got 0"),
        ({"samples": 0}, "samples is the number of samples of a pass, 1 or more; got 0"),
    ],
)
def test_wrong_arguments_of_growth_are_refused(how, message):
    with pytest.raises(ValueError, match=message):
        growing(**how)


def test_steps_are_not_known_before():
    with pytest.raises(ValueError, match="unknown before the training"):
        growing().steps(100)


@pytest.mark.slow
def test_examples_in_docstrings():
    x, y = numbers()
    names = {"tfscale": tfscale, "model": compiled(momentum(0.01)), "x": x, "y": y}
    for thing in (module.Curvature, callbacks.Adversarial):
        finder = doctest.DocTestFinder(recurse=False).find(thing, thing.__name__, globs=names)
        (test,) = [one for one in finder if one.examples]
        assert doctest.DocTestRunner().run(test).failed == 0
