"""Methods over several processes: what one process with as many devices computes."""

import numpy as np
import pytest

from tests.compression.methods import of_two_processes
from tests.compression.workers.train import METHODS, train
from tfscale import ScaleStrategy


@pytest.mark.slow
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
    weights, found, methods = of_two_processes("train.py", **transport)
    strategy = ScaleStrategy("ring", None, ["CPU:0", "CPU:1"], method=METHODS)
    model, losses = train(strategy)
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    np.testing.assert_allclose(weights, [w.sum() for w in model.get_weights()], atol=1e-3)
    assert losses[-1] < losses[0]
    assert set(methods) == {row.method for row in strategy.explain()} == {
        "fp32", "int4 + feedback", "int8 + feedback", "PowerSGD(2) + feedback",
        "RandomK(0.2) + feedback", "TopK(0.05) + feedback",
    }  # fmt: skip
