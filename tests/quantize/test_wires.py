"""Wires by sensitivity: an ordinary policy, within its bytes, that training uses."""

import dataclasses
import os
from pathlib import Path

import keras
import numpy as np
import pytest

from tests import warm
from tests.quantize import nets
from tfscale import ScaleStrategy, quantize
from tfscale.analysis.curvature.results import Estimate
from tfscale.analysis.quantize.numbers import quantized
from tfscale.analysis.quantize.wires import lost_share
from tfscale.collectives.wires import nbytes
from tfscale.compression import Gradient

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parents[2]
SHAPES = {"net/first": (64, 64), "net/second": (64, 64), "net/last": (64, 32)}


@pytest.fixture(scope="module")
def study():
    """A study of three layers, of which the first has the largest curvature by far."""
    found = nets.study()
    values = (1.0, 0.001, 0.01)
    layers = [
        dataclasses.replace(layer, shapes=(SHAPES[layer.path],), curvature=Estimate(value, 0, 8))
        for layer, value in zip(found.layers, values, strict=True)
    ]
    return dataclasses.replace(found, layers=tuple(layers))


def chosen(policy):
    return {
        path: str(policy.method_of(Gradient(f"{path}/kernel", shape, "float32"))).split()[0]
        for path, shape in SHAPES.items()
    }


@pytest.mark.slow
def test_more_bits_travel_where_the_loss_bends_more(study):
    policy = quantize.wires(study, budget="35%")
    found = chosen(policy)
    widths = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
    bits = [widths[found[path]] for path in ("net/first", "net/last", "net/second")]
    assert bits == sorted(bits, reverse=True) and bits[0] > bits[-1]
    size = sum(nbytes(wire, np.prod(SHAPES[path])) for path, wire in found.items())
    assert size <= 0.35 * 4 * (64 * 64 * 2 + 64 * 32)
    assert str(policy.method_of(Gradient("net/first/bias", (4096,), "float32"))) == "fp32"


def test_a_larger_budget_takes_better_wires(study):
    assert set(chosen(quantize.wires(study, "100%")).values()) == {"fp32"}
    assert set(chosen(quantize.wires(study, "14.1%")).values()) == {"int4"}
    with pytest.raises(quantize.InfeasibleError, match="budget is at most.*the smallest possible"):
        quantize.wires(study, "10%")


def test_the_lost_share_is_about_that_of_a_codec():
    numbers = np.random.default_rng(0).standard_normal((400, 256))
    for wire, bits in (("int8", 8), ("int4", 4)):
        share = np.square(quantized(numbers, bits, axis=0) - numbers).sum() / (numbers**2).sum()
        assert lost_share(wire) == pytest.approx(share, rel=0.1)


def test_a_study_of_errors_alone_is_refused(study):
    with pytest.raises(ValueError, match="study.by is 'trace' or 'fisher'.*got 'error'"):
        quantize.wires(dataclasses.replace(study, by="error"))


def test_training_uses_the_policy():
    study = nets.study()
    policy = quantize.wires(study, "60%", wires=("fp32", "int8"))
    strategy = ScaleStrategy("ring", wire=policy, devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        model, x, y = nets.dense(trained=False)
    model.fit(x, y, batch_size=24, verbose=0)
    told = str(strategy.explain())
    assert "int8" in told and "fp32" in told


@pytest.mark.slow
def test_wires_are_chosen_again_while_a_model_trains():
    strategy = ScaleStrategy("ring", wire="int4", devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        model, x, y = nets.dense(trained=False)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(str(strategy.explain()))

    refresh = quantize.RefreshWires(
        x, y, every=2, budget="60%", wires=("fp32", "int8"), batch_size=48
    )
    model.fit(x, y, batch_size=24, epochs=3, verbose=0, callbacks=[refresh, Look()])
    (policy,) = refresh.policies
    wanted = {
        path: str(policy.method_of(Gradient(f"net/{path}/kernel", shape, "float32"))).split()[0]
        for path, shape in {"first": (5, 6), "second": (6, 6), "last": (6, 2)}.items()
    }
    assert set(wanted.values()) == {"fp32", "int8"}
    assert "int8" not in seen[3] and "int8" in seen[4]  # two steps for each epoch
    assert np.all(np.isfinite(model.predict(x, verbose=0)))


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_workers_choose_the_same_wires_again():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [str(WORKERS / "refresh.py")]
    with warm.Workers(command, 2, environment={"PYTHONPATH": path}) as group:
        told = [[line for line in text.splitlines() if "TOLD" in line] for text in group.wait(300)]
    assert len(told[0]) == 1 and told[0] == told[1]
    assert "int8" in told[0][0] and "int4" not in told[0][0]


def test_wires_cannot_be_refreshed_outside_of_a_strategy():
    model, x, y = nets.dense(trained=False)
    with pytest.raises(ValueError, match="made outside of one"):
        model.fit(x, y, verbose=0, callbacks=[quantize.RefreshWires(x, y, every=1)])
