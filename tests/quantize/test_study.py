"""Sensitivities: what is measured, of which layers, when it ends, what is refused."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import warm
from tests.quantize import nets
from tfscale import ScaleStrategy, curvature, quantize
from tfscale.analysis.quantize.kernels import kernels_of
from tfscale.analysis.quantize.numbers import quantized
from tfscale.analysis.quantize.study import ENDS

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mixed():
    """A net with layers of many kinds, and its study by plain error."""
    model = nets.mixed()
    return model, quantize.sensitivity(model, *nets.data(), by="error", trained=True)


def test_all_kinds_of_layers_are_studied_in_the_models_order(mixed):
    _, study = mixed
    assert [layer.path for layer in study.layers] == [
        "stem", "branch", "down", "separable", "depthwise", "transposed", "attention/query",
        "attention/key", "attention/value", "attention/attention_output", "head",
    ]  # fmt: skip
    assert study.kept == ("recurrent/gru_cell",)
    assert "stay in float: recurrent/gru_cell" in str(study)


def test_multiplications_are_counted(mixed):
    _, study = mixed
    pixels = 64
    assert {layer.path: layer.products for layer in study.layers} == {
        "stem": pixels * 4 * 27,
        "branch": pixels * 4 * 36,
        "down": pixels * 4 * 4,
        "separable": pixels * 4 * 9 + pixels * 4 * 4,
        "depthwise": 9 * 4 * 9,
        "transposed": 9 * 4 * 4 * 6,
        **{f"attention/{name}": 36 * 36 for name in ("query", "key", "value", "attention_output")},
        "head": 8,
    }


def test_layers_that_feed_one_sum_are_found(mixed):
    _, study = mixed
    assert study.sums == (("branch", "down"),)


def test_ranges_of_inputs_are_calibrated(mixed):
    model, study = mixed
    x, _ = nets.data()
    seen = study["stem"].inputs
    assert (seen.low, seen.high) == (x.min(), x.max())
    rounded = np.rint((x - seen.low) / (seen.high - seen.low) * 15) / 15
    rounded = rounded * (seen.high - seen.low) + seen.low
    error = np.square(rounded - x).mean() / np.square(x).mean()
    assert seen.error(4) == pytest.approx(error, rel=0.1)
    inner = keras.Model(model.input, model.get_layer("head").input)
    assert study["head"].inputs.high == pytest.approx(inner(x).numpy().max(), rel=1e-4)


def test_the_error_is_that_of_the_quantizer(mixed):
    model, study = mixed
    kernels = {kernel.path: kernel for kernel in kernels_of(model)}
    for path in ("stem", "depthwise", "transposed", "attention/query", "head"):
        value = np.asarray(kernels[path].variable)
        error = np.square(quantized(value, 3, axis=kernels[path].axes, method="mse") - value).sum()
        assert study[path].errors[3] == pytest.approx(error, rel=1e-5)


# ------------------------------------------------------------------- curvature


def exact_blocks(model, x, y):
    kernels = [kernel.variable for kernel in kernels_of(model)]
    h = curvature.Hessian(model, x, y, variables=kernels, batch_size=len(x))
    return [(h @ np.eye(h.size))[place, place] for place in h.parts.values()]


@pytest.fixture(scope="module")
def measured():
    """A trained net, its study, and the exact Hessian's blocks."""
    model, x, y = nets.dense()
    study = quantize.sensitivity(model, x, y, samples=64, accuracy=0, batch_size=48)
    return model, x, y, study, exact_blocks(model, x, y)


def test_traces_are_within_their_errors(measured):
    _, _, _, study, blocks = measured
    for layer, block in zip(study.layers, blocks, strict=True):
        found = layer.curvature
        assert abs(found.value - np.diag(block).mean()) <= 3 * found.error
        for width, cost in layer.costs.items():
            assert cost.value == pytest.approx(found.value * layer.errors[width], rel=1e-5)


@pytest.mark.slow
def test_each_batch_has_vectors_of_its_own_and_few_of_them_tell_the_error(measured):
    model, x, y, _, blocks = measured
    off = []
    for seed in range(4):
        study = quantize.sensitivity(
            model, x, y, bits=[4], samples=4, accuracy=0, batch_size=5, seed=seed
        )
        for layer, block in zip(study.layers, blocks, strict=True):
            found = layer.curvature
            assert found.samples == 8 * (study.samples - 1) + 1  # 10 batches in 8 strata
            off.append((found.value - np.diag(block).mean()) / found.error)
    assert np.abs(off).max() <= 4 and 0.3 <= np.sqrt(np.mean(np.square(off))) <= 2


@pytest.mark.slow
def test_products_of_batches_add_up_to_those_of_the_matrix(measured):
    model, x, y, _, _ = measured
    h = curvature.Hessian(model, x, y, batch_size=20)
    vectors = np.random.default_rng(0).standard_normal((3, h.size)).astype(np.float32)
    passed = list(h.products_of_batches(lambda batch: (batch + 1) * vectors[:2]))
    assert [batch for batch, _, _ in passed] == [0, 1, 2] and h.batches == 3
    total = sum(products / (batch + 1) for batch, _, products in passed)
    np.testing.assert_allclose(total, h.products(vectors)[:2], rtol=1e-4, atol=1e-6)


def test_the_top_eigenvalue(measured):
    model, x, y, _, blocks = measured
    study = quantize.sensitivity(model, x, y, by="eigenvalue", bits=[4], batch_size=48)
    for layer, block in zip(study.layers, blocks, strict=True):
        assert layer.curvature.value == pytest.approx(np.linalg.eigvalsh(block)[-1], rel=0.02)


@pytest.mark.slow
def test_fishers_trace(measured):
    model, x, y, _, _ = measured
    study = quantize.sensitivity(model, x, y, by="fisher", samples=64, accuracy=0, batch_size=48)
    kernels = [kernel.variable for kernel in kernels_of(model)]
    fisher = curvature.Fisher(model, x, y, variables=kernels, batch_size=48)
    exact = np.diag(fisher @ np.eye(fisher.size))
    for layer, place in zip(study.layers, fisher.parts.values(), strict=True):
        assert abs(layer.curvature.value - exact[place].mean()) <= 3 * layer.curvature.error


def test_groups_have_a_curvature_and_a_scale_of_their_own(measured):
    model, x, y, _, blocks = measured
    study = quantize.sensitivity(
        model, x, y, bits=[4], group=2, samples=64, accuracy=0, batch_size=48
    )
    for layer, block, kernel in zip(study.layers, blocks, kernels_of(model), strict=True):
        value = np.asarray(kernel.variable)
        diagonal = np.diag(block).reshape(value.shape)
        lost = np.square(quantized(value, 4, axis=-1, group=2, method="mse") - value)
        groups = [slice(i, i + 2) for i in range(0, value.shape[1], 2)]
        exact = sum(diagonal[:, g].mean() * lost[:, g].sum() for g in groups)
        assert abs(layer.costs[4].value - exact) <= 3 * layer.costs[4].error
        assert layer.errors[4] == pytest.approx(lost.sum(), rel=1e-4)


@pytest.mark.slow
def test_a_curvature_below_its_error_counts_as_its_error():
    layer = nets.study()["net/first"]
    low = type(layer.curvature)(-1.0, 0.25, 8)
    changed = dataclasses.replace(layer, curvature=low, errors={4: 1.0}, costs={4: low})
    assert changed.cost(4) == 0.25 and changed.cost(32) == 0


def test_slopes_tell_whether_the_model_is_near_a_minimum(measured):
    model, x, y, study, _ = measured
    kernel = kernels_of(model)[0]
    gradient = curvature.Hessian(model, x, y, variables=[kernel.variable], batch_size=48).gradient
    value = np.asarray(kernel.variable)
    lost = quantized(value, 4, axis=-1, method="mse") - value
    assert study["net/first"].slopes[4] == pytest.approx(gradient @ lost.ravel(), rel=1e-3)
    fresh, x, y = nets.dense(trained=False)
    steep = quantize.sensitivity(fresh, x, y, trained=True, samples=8, batch_size=48)
    assert steep.is_steep and "not near a minimum of this loss" in str(steep).replace("\n ", "")


# ------------------------------------------------------------------- the end


@pytest.mark.slow
def test_sampling_ends_when_the_order_is_known():
    model, x, y = nets.dense()
    study = quantize.sensitivity(model, x, y, samples=400, accuracy=0, batch_size=48)
    assert study.ended == "order" and study.samples < 400
    assert ENDS["order"] in str(study)


@pytest.mark.slow
def test_sampling_ends_at_the_accuracy_or_at_the_number_of_samples():
    assert nets.study(samples=8, accuracy=1e6).ended in ("accuracy", "order")
    few = nets.study(samples=2, accuracy=0)
    assert few.samples == 2 and few.ended in ("samples", "order")


# ------------------------------------------------------------------- files


def test_a_study_is_saved_and_read(tmp_path):
    study = nets.study(group=2)
    study.save(tmp_path / "study.json")
    assert quantize.Study.load(tmp_path / "study.json") == study


@pytest.mark.slow
def test_a_killed_study_goes_on(tmp_path):
    file = tmp_path / "study.json"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.Popen(
        [sys.executable, str(WORKERS / "study.py"), str(file)],
        env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not file.exists() and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = quantize.Study.load(file)
    assert 0 < before.samples < 10_000
    model, x, y = nets.dense(trained=False)
    how = {"accuracy": 0, "trained": True, "batch_size": 48, "samples": before.samples + 4}
    found = quantize.sensitivity(model, x, y, file=file, **how)
    assert list(map(list, found.rows[: before.samples])) == list(map(list, before.rows))
    anew = quantize.sensitivity(model, x, y, **how)
    np.testing.assert_allclose(found.rows, anew.rows, rtol=1e-3, atol=1e-7)


@pytest.mark.slow
def test_a_file_of_another_study_is_refused(tmp_path):
    model, x, y = nets.dense()
    file = tmp_path / "study.json"
    how = {"samples": 2, "batch_size": 48, "file": file}
    quantize.sensitivity(model, x, y, **how)
    with pytest.raises(ValueError, match="file holds a study with seed='0'.*seed='1'"):
        quantize.sensitivity(model, x, y, seed=1, **how)
    with pytest.raises(ValueError, match="file holds a study of other data"):
        quantize.sensitivity(model, 2 * x, y, **how)
    model.get_layer("last").kernel.assign(np.ones([6, 2]))
    with pytest.raises(ValueError, match="file holds a study with weights="):
        quantize.sensitivity(model, x, y, **how)


# ------------------------------------------------------------------- refusals


def test_a_model_that_was_never_trained_is_refused():
    model, x, y = nets.dense(trained=False)
    with pytest.raises(
        ValueError, match="has made no step.*train the model first, or pass trained"
    ):
        quantize.sensitivity(model, x, y)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_refused():
    model, x, y = nets.dense()
    model.get_layer("last").kernel.assign(np.full([6, 2], np.nan))
    with pytest.raises(curvature.NotFiniteError, match="the loss of 'net' is nan"):
        quantize.sensitivity(model, x, y)


@pytest.mark.slow
def test_data_without_targets_are_refused():
    model, x, _ = nets.dense()
    with pytest.raises(ValueError, match="compares outputs with targets, and the data have none"):
        quantize.sensitivity(model, x)


def test_unknown_layers_are_refused_if_strict():
    with pytest.raises(ValueError, match="does not know the layers recurrent/gru_cell"):
        quantize.sensitivity(nets.mixed(), *nets.data(), by="error", trained=True, strict=True)


def test_a_model_without_known_layers_is_refused():
    model = keras.Sequential([keras.Input([4, 2]), keras.layers.GRU(2)])
    model.compile(loss="mse")
    with pytest.raises(ValueError, match="has no layer that quantize knows"):
        quantize.sensitivity(model, np.ones([4, 4, 2]), np.ones([4, 2]), trained=True)


# ------------------------------------------------------------------- replicas


@pytest.mark.slow
def test_two_replicas_get_the_study_of_one_device():
    expected = quantize.sensitivity(*nets.dense(trained=False), trained=True, samples=4)
    strategy = ScaleStrategy("ring", devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        model, x, y = nets.dense(trained=False)
    found = quantize.sensitivity(model, x, y, trained=True, samples=4)
    size = np.abs(expected.rows).max()
    np.testing.assert_allclose(found.rows, expected.rows, rtol=1e-4, atol=1e-6 * size)
    assert tf.distribute.get_strategy() is not strategy


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_workers_get_the_same_study_and_the_first_one_writes_it(tmp_path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [str(WORKERS / "study.py"), str(tmp_path / "study.json"), "workers"]
    with warm.Workers(command, 2, environment={"PYTHONPATH": path}) as group:
        first, other = group.wait(300)
    told = [line for line in first.splitlines() if line.startswith("TOLD")]
    assert len(told) == 2 and told == [line for line in other.splitlines() if "TOLD" in line]
    expected = quantize.sensitivity(*nets.dense(trained=False), trained=True, samples=8)
    found = quantize.Study.load(tmp_path / "study.json")
    np.testing.assert_allclose(found.rows, expected.rows, rtol=1e-3, atol=1e-6)
