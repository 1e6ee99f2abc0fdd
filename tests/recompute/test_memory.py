"""Memory as the operating system sees it, of trainings in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tfscale.bench.memory import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

OUT_OF_MEMORY = ("OOM", "ResourceExhausted", "bad_alloc", "MemoryError", "pthread_create")


def train(how, limit=0):
    """The peak of a training's address space, or None and what it said when it failed."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.recompute.limited", how, str(limit)],
        # One arena: threads would reserve address space of their own.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "MALLOC_ARENA_MAX": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if ran.returncode:
        return None, ran.stderr
    return int(ran.stdout.split("trained: ")[1]), ran.stderr


def test_a_model_that_does_not_fit_trains_with_recomputation():
    plain, said = train("plain")
    assert plain, said
    ours, said = train("recompute")
    assert ours, said
    assert plain - ours > 100e6
    limit = ours + (plain - ours) // 4  # TensorFlow can do with less than its peak
    failed, said = train("plain", limit)
    assert failed is None
    assert any(sign in said for sign in OUT_OF_MEMORY), said[-2000:]
    trained, said = train("recompute", limit)
    assert trained, said[-2000:]
    assert trained <= limit


def test_two_replicas_take_no_more_than_was_predicted(capsys):
    """By the command that docs/recompute.md names; how much less, at full size: benchmarks.md."""
    assert main(["--models", "conv", "--replicas", "2", "--scale", "0.3"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    plain, ours = (float(peak) for peak in re.findall(r"(\d+) MB \(", printed)[:2])
    (predicted,) = re.findall(r"predicted (\d+) MB", printed)
    assert ours < 0.45 * plain
    assert ours < 1.15 * float(predicted)
    assert len(set(re.findall(r"loss ([\d.]+)", printed))) == 1
