"""``tfscale bench fit``: its arithmetic, and real runs with toy models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfscale.analysis.telemetry.timeline import Exchanged
from tfscale.launch import WorkerFailed
from tfscale.tools.bench import fit, fit_trace
from tfscale.tools.bench.fit_contestants import PARTS, FitContestant, contestants
from tfscale.tools.bench.fit_crew import Crew
from tfscale.tools.bench.fit_table import conclude, hidden_share
from tfscale.tools.bench.fit_trace import RankTimeline


def records(part: str, *times: list[float]):
    group = contestants(part)[: len(times)]
    return conclude(group, [7] * len(group), [2] * len(group), times)


def test_ratios_are_taken_within_rounds() -> None:
    stock, ours = records("workers", [1.0, 10.0, 2.0], [0.5, 4.0, 2.0])
    assert (stock.times, ours.times) == (1, 2)
    assert ours.median_ms == 2000 and ours.min_ms == 500 and ours.steps_per_second == 0.5


def test_the_first_of_each_group_is_not_ours() -> None:
    firsts = {part: contestants(part)[0].way for part in PARTS}
    assert firsts == {
        "one": "none",
        "devices": "mirrored",
        "workers": "stock",
        "overlap": "apart",
        "methods": "apart",
        "rules": "rules",
        "sharding": "copies",
    }


@pytest.mark.parametrize("whole, share", [(1.0, 1.0), (1.05, 0.75), (1.2, 0.0), (1.3, -0.5)])
def test_hidden_is_what_takes_no_time_of_its_own(whole: float, share: float) -> None:
    found = records("overlap", [1.0] * 3, [whole] * 3, [0.2] * 3)
    assert hidden_share(found) == pytest.approx(share)
    assert hidden_share(records("one", [1.0])) is None


def test_nearby_ops_of_all_threads_are_one_stretch() -> None:
    ops = [("a:MatMul", 0.0, 0.010), ("b:Relu", 0.004, 0.006), ("c:MatMul", 0.0101, 0.02)]
    back = [("gradient_tape/a:MatMul", 0.03, 0.04)]
    assert fit_trace.busy([*ops, *back]) == [(0.0, 0.02, False), (0.03, 0.04, True)]


def test_a_trace_has_a_process_for_each_rank_and_every_bucket() -> None:
    steps, compute = [0.0, 1.0], [("a:MatMul", 0.0, 0.5)]
    buckets = [
        Exchanged("adam gradients 0", 0.3, 0.7, True),
        Exchanged("adam gradients 1", 0.4, 0.9, True),
    ]
    events = fit_trace.chrome([RankTimeline(r, steps, compute, buckets) for r in (0, 1)])[
        "traceEvents"
    ]
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank]
        assert [e["ph"] for e in mine] == ["M", "M", "X", "b", "e", "b", "e"]
        begin, end = mine[3:5]
        assert (begin["id"], begin["name"]) == (end["id"], "adam gradients 0")
        assert (begin["ts"], end["ts"]) == pytest.approx((3e5, 7e5))


def test_exposed_is_what_travels_while_nothing_computes() -> None:
    buckets = [
        Exchanged("reduce_1", 0.0, 1.0, False),
        Exchanged("adam gradients 0", 0.3, 0.7, True),
    ]
    slow, fast = ([("a:MatMul", 0.0, end)] for end in (0.6, 0.5))
    timelines = [
        RankTimeline(rank, [0.0, 1.0], each, buckets) for rank, each in enumerate([slow, fast])
    ]
    assert fit_trace.exposed_seconds(timelines) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "argv, told",
    [
        (["--parts", "two"], "one, devices, workers, overlap"),
        (["--wires", "fp31"], "fp32, bf16"),
        (["--rounds", "0"], "whole number"),
    ],
)
def test_bad_words_are_refused_with_the_good_ones(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        fit.main(argv)
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_a_worker_that_fails_shows_its_last_words(tmp_path: Path) -> None:
    nobody = FitContestant("one", "nobody", "none", "no such model")
    with pytest.raises(WorkerFailed, match="no such model"):
        Crew(nobody, None, tmp_path, 200)


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    "part, ways",
    [
        pytest.param("one", ["none", "scale", "auto"], marks=pytest.mark.full),
        pytest.param("devices", ["mirrored", "scale"] * 2, marks=pytest.mark.full),
        ("workers", ["stock", "scale", "tensorflow"]),
        pytest.param("overlap", ["apart", "scale", "sums"], marks=pytest.mark.full),
    ],
)
def test_every_part_measures(part: str, ways: list[str], tmp_path: Path) -> None:
    words = [
        "bench", "fit", "--tiny", "--parts", part, "--rounds", "2", "--seconds", "0.05",
        "--wires", "int8", "--json", "out.json", "--plot", "out.png", "--trace", "trace.json",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tfscale", *words],
        cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "command: tfscale bench fit" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert [record["way"] for record in found["records"]] == ways
    assert all(record["rounds"] == 2 and record["min_ms"] > 0 for record in found["records"])
    assert (found["hidden_share"] is None) == (part != "overlap")
    assert (tmp_path / "out.png").stat().st_size > 5000
    if part == "overlap":
        _check_trace(tmp_path)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_turn_by_a_rule_ends_when_replicas_agree(tmp_path: Path) -> None:
    words = ["bench", "fit", "--tiny", "--parts", "rules", "--rounds", "1", "--json", "out.json"]
    rules = ["EveryStep()", "LocalSGD(20)", "DiLoCo(20, delay=5)"]
    done = subprocess.run(
        [sys.executable, "-m", "tfscale", *words, "--rules", *rules],
        cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    exact, rare, behind = json.loads((tmp_path / "out.json").read_text())["records"]
    assert [record["steps_per_turn"] for record in (exact, rare, behind)] == [2, 20, 25]
    assert 15 < exact["sent_per_step"] / rare["sent_per_step"] < 30
    assert behind["sent_per_step"] == pytest.approx(rare["sent_per_step"], rel=0.05)
    assert "a replica sends in a step: LocalSGD(20)" in done.stdout


def _check_trace(folder: Path) -> None:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank]
        assert {event.get("cat") for event in mine} == {None, "compute", "exchange"}
        assert any("gradients" in event["name"] for event in mine)
    assert (folder / "trace.png").stat().st_size > 5000


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
