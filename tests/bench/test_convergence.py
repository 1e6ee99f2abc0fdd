"""How models learn on low-precision wires: the full table is in docs/benchmarks.md."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import mean

import numpy as np
import pytest

from tfscale.bench.convergence import contestants
from tfscale.bench.digits import judge
from tfscale.bench.trainings import spread

pytestmark = pytest.mark.timeout(960)


def test_the_exact_wire_comes_first_and_error_feedback_where_it_is_the_default():
    assert list(contestants(["fp32", "int8", "sign"])) == [
        ("fp32", False), ("int8", False), ("sign", True), ("sign", False),
    ]  # fmt: skip


def test_judge():
    logits = np.array([[0.0, 0.0], [0.0, 0.0], [-1000.0, 1000.0], [5000.0, 0.0]])
    accuracy, loss = judge(lambda images: logits, None, np.array([0, 1, 1, 0]))
    assert accuracy == 75
    assert loss == pytest.approx(np.log(2) / 2)


def test_spread():
    assert spread([1.0, 2.0, 3.0], "+.2f") == "+2.00 ± 1.00"
    assert spread([1.0], ".1f") == "1.0 ± nan"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    file = tmp_path_factory.mktemp("convergence") / "runs.json"
    words = ["--seeds", "2", "--wires", "int8,sign", "--json", str(file)]
    subprocess.run(
        [sys.executable, "-m", "tfscale", "bench", "convergence", *words], timeout=900, check=True
    )

    found = json.loads(file.read_text())

    def of(wire, feedback=False):
        same = [run for run in found if (run["wire"], run["feedback"]) == (wire, feedback)]
        return {what: [run[what] for run in same] for what in ("accuracy", "loss")}

    return of


@pytest.mark.full
def test_sign_needs_error_feedback(runs):
    exact, good, bad = runs("fp32"), runs("sign", True), runs("sign")
    assert mean(exact["accuracy"]) > 96.5
    assert abs(mean(good["accuracy"]) - mean(exact["accuracy"])) < 1
    assert max(good["loss"]) < 1.5 * min(exact["loss"])
    assert min(bad["loss"]) > 2 * max(exact["loss"])


@pytest.mark.full
def test_int8_learns_as_fp32(runs):
    exact, int8 = runs("fp32"), runs("int8")
    for one, other in zip(exact["accuracy"], int8["accuracy"], strict=True):
        assert abs(one - other) < 0.5
    for one, other in zip(exact["loss"], int8["loss"], strict=True):
        assert abs(one - other) < 0.02 * one
