"""No argument of an op ends the process: calls with odd ones, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "odd_calls.py"
ROOT = PROGRAM.parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("calls", [100, pytest.param(4000, marks=pytest.mark.full)])
def test_no_odd_argument_ends_the_process(calls):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, PROGRAM, str(calls)],
        env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=1800,
    )
    last = ended.stdout.splitlines()[-1:]
    assert ended.returncode == 0, f"{last} ended the process: {ended.stderr[-2000:]}"
    assert last[0].startswith(f"ALL {calls} "), last
