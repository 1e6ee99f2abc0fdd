"""``ScaleStrategy`` trains Keras 2 models, with parts of tensorflow-addons in its scope."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.addons.models import OPTIMIZERS, furthest, scale, train
from tests.covering import grid, singles
from tfscale.compression import Adaptive, PowerSGD, Staged, TopK, deciding
from tfscale.launch import LocalWorkers

ROOT = Path(__file__).resolve().parents[2]


@grid("optimizer, devices", OPTIMIZERS, [2, 4], aspects=singles)
def test_replicas_train_as_one_device(optimizer, devices):
    weights, logs = train(optimizer)
    found, seen = train(optimizer, scale(devices))
    assert furthest(weights, found) <= 2e-6
    for name, values in logs.items():
        np.testing.assert_allclose(seen[name], values, atol=2e-5, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("optimizer", ["adam", "tfa lamb"])
def test_gradients_travel_on_the_wire_that_was_asked_for(optimizer):
    strategy = scale(2, "int8")
    train(optimizer, strategy, epochs=1)
    assert {row.wire for row in strategy.explain()} == {"int8"}


def test_low_precision_learns_and_remembers_what_it_lost():
    weights, logs = train("adam")
    strategy = scale(2, "int4")
    found, seen = train("adam", strategy)
    assert seen["loss"][-1] < seen["loss"][0]
    assert seen["loss"][-1] == pytest.approx(logs["loss"][-1], rel=0.1)
    assert furthest(weights, found) > 1e-6, "nothing was lost: int4 was not used"


def test_methods_other_than_wires():
    method = {"kernel": PowerSGD(1, saves=0), ".": TopK(0.5)}
    strategy = tfscale.ScaleStrategy("ring", None, ["CPU:0", "CPU:1"], method=method)
    _, logs = train("adam", strategy)
    assert logs["loss"][-1] < 0.9 * logs["loss"][0]
    assert {row.method for row in strategy.explain()} == {
        "PowerSGD(1) + feedback",
        "TopK(0.5) + feedback",
    }


@pytest.mark.slow
def test_a_method_that_follows_another():
    method = {".": Staged("fp32", PowerSGD(1, saves=0), when=6)}  # of twelve updates
    strategy = tfscale.ScaleStrategy("ring", None, ["CPU:0", "CPU:1"], method=method)
    _, before = train("adam", strategy, epochs=1)
    assert {row.method for row in strategy.explain()} == {"fp32"}
    _, logs = train("adam", strategy, epochs=3)
    assert logs["loss"][-1] < logs["loss"][0] == before["loss"][0]
    assert "PowerSGD(1) + feedback" in {row.method for row in strategy.explain()}


@pytest.mark.full
def test_methods_that_are_chosen_live(monkeypatch):
    method = {".": Adaptive(1.0, ("int8", "int4"))}
    strategy = tfscale.ScaleStrategy("ring", None, ["CPU:0", "CPU:1"], method=method)
    monkeypatch.setattr(deciding.Decider, "price", lambda self, bucket, method: -method)
    monkeypatch.setattr(deciding, "PAYS", 1e6)
    monkeypatch.setattr(deciding, "_mostly_below", lambda limit, turns: True)
    _, logs = train("adam", strategy, epochs=12)
    assert logs["loss"][-1] < logs["loss"][0]
    (packing,) = strategy.reducer.packings.values()
    assert {change.after for change in packing.changes} & {"int8 + feedback", "int4 + feedback"}
    # Which of them the last step took is up to times: it may have tried another.
    named = {str(variant) for variant in Adaptive(1.0, ("int8", "int4")).variants}
    last = packing.changes[-1]
    for row in strategy.explain():
        assert row.method in named
        assert f"{last.after} from step {last.step} on, as {last.why}" in row.switching


@pytest.mark.timeout(400)
def test_two_processes_train_as_one_device(tmp_path):
    weights, _ = train("tfa lamb")
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, str(Path(__file__).parent / "workers" / "train.py")]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment["MEETING"] = str(tmp_path)
    with LocalWorkers(command, 2, environment=environment) as workers:
        outputs = workers.wait(300)
    for output in outputs:
        (line,) = [line for line in output.splitlines() if line.startswith("WEIGHTS ")]
        found = np.array([float(x) for x in line.split()[1:]])
        np.testing.assert_allclose(found, np.concatenate([w.ravel() for w in weights]), atol=2e-6)


def test_a_checkpoint_holds_what_was_lost(tmp_path):
    """Residuals hang on the optimizer, where TensorFlow finds them."""
    strategy = scale(2, "sign")
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).standard_normal((8, 4), np.float32)
    model.fit(x, x[:, :3], batch_size=8, verbose=0)
    path = tf.train.Checkpoint(optimizer=model.optimizer).save(str(tmp_path / "checkpoint"))
    saved = [name for name, _ in tf.train.list_variables(path) if "residual" in name]
    assert len(saved) == len(model.trainable_variables)
