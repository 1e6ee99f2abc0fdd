"""Methods over several processes: what one process with as many devices computes."""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.compression.workers.train import METHODS, train
from tfscale import ScaleStrategy
from tfscale.launch import LocalWorkers

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "workers" / "train.py"


@pytest.mark.parametrize(
    "way",
    [
        "sockets",
        pytest.param("TCP", marks=pytest.mark.full),
        pytest.param("grpc", marks=pytest.mark.full),
    ],
)
def test_two_processes_are_as_two_devices(way):
    transport = {
        "sockets": {},
        "TCP": {"TFSCALE_SHARED_MEMORY": "0"},
        "grpc": {"TFSCALE_TRANSPORT": "grpc"},
    }[way]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **transport,
    }
    with LocalWorkers([sys.executable, str(WORKER)], 2, environment=environment) as workers:
        outputs = workers.wait(200)
    first, second = (json.loads(re.search("^TRAINED (.*)$", o, re.MULTILINE)[1]) for o in outputs)
    assert first == second
    strategy = ScaleStrategy("ring", None, ["CPU:0", "CPU:1"], method=METHODS)
    model, losses = train(strategy)
    weights, found, methods = first
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    np.testing.assert_allclose(weights, [w.sum() for w in model.get_weights()], atol=1e-3)
    assert losses[-1] < losses[0]
    assert set(methods) == {row.method for row in strategy.explain()} == {
        "fp32", "int4 + feedback", "int8 + feedback", "PowerSGD(2) + feedback",
        "RandomK(0.2) + feedback", "TopK(0.05) + feedback",
    }  # fmt: skip
