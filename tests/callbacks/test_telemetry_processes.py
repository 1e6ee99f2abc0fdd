"""Telemetry of two processes: a file from each, and one timeline of both."""

import json
import os
import re
from pathlib import Path

import pytest

from tests import warm
from tests.callbacks.telemetries import BATCH, STEPS, added, lines
from tfscale.telemetry import merge

WORKER = Path(__file__).parent / "workers" / "telemetry.py"
ROOT = Path(__file__).parents[2]
SECONDS = 600  # on the busiest machine


@pytest.mark.timeout(SECONDS + 60)
def test_two_processes(tmp_path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [str(WORKER), str(tmp_path)]
    with warm.Workers(command, 2, environment={"PYTHONPATH": path}) as group:
        printed = group.wait(SECONDS)
    steps = []
    for rank, output in enumerate(printed):
        file = tmp_path / f"run.rank{rank}.jsonl"
        (start,) = lines(file, "start")
        assert (start["ranks"], start["devices"]) == ([rank], 2)
        steps.append(lines(file, "step"))
        assert len(steps[-1]) == 2 * STEPS
        assert {line["samples"] for line in steps[-1]} == {BATCH}
        (sent,) = re.findall(r"^SENT (\d+)$", output, re.MULTILINE)
        assert added(steps[-1], "sent") == int(sent)
        assert added(steps[-1], "saved") > 2 * int(sent)
        assert lines(file, "error")
        assert list((tmp_path / "board" / f"rank{rank}").iterdir())
    assert [line["saved"] for line in steps[0]] == [line["saved"] for line in steps[1]]
    check_timeline(tmp_path, steps)


def check_timeline(folder, steps):
    merge(sorted(folder.glob("trace.rank*.json")), folder / "trace.json")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank]
        assert {event["ph"] for event in mine} == {"M", "X", "b", "e"}
        begin, end = 1e6 * steps[rank][2]["begin"], 1e6 * steps[rank][3]["end"]
        assert all(begin <= event["ts"] < end for event in mine if event["ph"] in "Xb")
