"""Tests for GPUs: k replicas on GPUs = one GPU. ``make test-gpu``; without a GPU nothing runs.

On one GPU replicas have logical devices of it: the engine, and TensorFlow's ring. With two GPUs
each replica has its own, and TensorFlow's collectives are NCCL.
"""

import functools

import pytest
import tensorflow as tf

from tests.strategy.cases import BY_NAME
from tests.strategy.compare import check
from tests.strategy.groups import SECONDS, judge, take

GPUS = len(tf.config.list_physical_devices("GPU"))
CASES = (
    *("sgd", "adam", "global_clipnorm", "last_batch_of_1", "embedding", "batch_norm"),
    *("float16_overflow", "lamb", "adahessian_curvature"),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * SECONDS + 60),
    pytest.mark.skipif(GPUS == 0, reason="TensorFlow sees no GPU"),
]


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch):
    monkeypatch.setenv("KIND", "GPU")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # products of float32 as exact as on CPUs


@functools.cache
def trained(strategy, layout):
    return take("exact.py", strategy, layout, CASES)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", ["scale", "tensorflow"])
def test_replicas_on_gpus_train_as_one(strategy, case):
    """Two GPUs use NCCL as "tensorflow", and the engine as "scale"."""
    (expected,) = trained("none", "1x1")[case]
    found = trained(strategy, "1x2")[case]
    judge(
        functools.partial(check, BY_NAME[case], expected),
        found,
        lambda: take("exact.py", strategy, "1x2", [case])[case],
    )
