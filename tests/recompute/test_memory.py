"""Memory as the operating system sees it, of trainings in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recompute import budgets
from tfscale.native.memory import WITHOUT_POOL
from tfscale.tools.bench.memory import Asked, main, measure

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

OUT_OF_MEMORY = ("OOM", "ResourceExhausted", "bad_alloc", "MemoryError", "pthread_create")


def train(how, limit=0):
    """The peak of a training's address space, or None and what it said when it failed."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.recompute.limited", how, str(limit)],
        # A pool, holes in a heap and arenas of threads would reserve what no tensor takes.
        env={**os.environ, **WITHOUT_POOL, "CUDA_VISIBLE_DEVICES": "-1", "MALLOC_ARENA_MAX": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if ran.returncode:
        return None, ran.stderr
    return int(ran.stdout.split("trained: ")[1]), ran.stderr


@pytest.mark.slow
def test_a_model_that_does_not_fit_trains_with_recomputation():
    plain, said = train("plain")
    assert plain, said
    ours, said = train("recompute")
    assert ours, said
    assert plain - ours > 100e6
    limit = (plain + ours) // 2  # a busy machine may take more or less than an idle one
    failed, said = train("plain", limit)
    assert failed is None
    assert any(sign in said for sign in OUT_OF_MEMORY), said[-2000:]
    trained, said = train("recompute", limit)
    assert trained, said[-2000:]
    assert trained <= limit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "replicas", "fraction"),
    [("transformer", 1, 0.4), pytest.param("mlp", 2, 0.6, marks=pytest.mark.full)],
)
def test_a_step_takes_what_was_predicted(model, replicas, fraction):
    """The full size is in docs/benchmarks/memory.md."""
    ours = measure(Asked(model, replicas, scale=0.25, fraction=fraction))
    assert ours.allocated == pytest.approx(ours.predicted, rel=0.15)
    assert ours.allocated <= ours.budget


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("net", budgets.NETS)
def test_every_budget_is_kept(net):
    for budget, taken, _ in budgets.in_a_process(net):
        assert taken <= budget


@pytest.mark.full
def test_the_command_shows_all_budgets(capsys):
    """The one that docs/recompute.md names."""
    assert main(["--models", "conv", "--replicas", "1", "--scale", "0.1", "--budgets", "2"]) == 0
    printed = capsys.readouterr().out
    for how in ("without", "the smallest", "100% up"):
        (row,) = re.findall(rf"^ *{how} +(.*)$", printed, re.MULTILINE)
        assert row.count(" MB") == (2 if how == "without" else 4)
    assert "command: tfscale bench memory --models conv" in printed


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_refused_in_a_line(capsys):
    assert (
        main(["--models", "conv", "--replicas", "1", "--scale", "0.1", "--fractions", "0.1"]) == 1
    )
    said = capsys.readouterr().err
    assert re.fullmatch(r"tfscale bench: error: .*Ask for at least .*\n", said)
