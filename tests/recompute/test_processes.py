"""Recomputation on several workers: each computes its own again, by the same plan."""

import os
import re
from pathlib import Path

import pytest

from tests import warm

WORKER = Path(__file__).parent / "workers" / "train.py"
ROOT = Path(__file__).parents[2]
SECONDS = 600  # on the busiest machine


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(
    ("workers", "devices"),
    [
        (2, 1),
        pytest.param(4, 1, marks=pytest.mark.full),
        pytest.param(2, 2, marks=pytest.mark.full),
    ],
)
def test_all_workers_train_the_same(workers, devices):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [str(WORKER), str(devices)]
    with warm.Workers(command, workers, environment={"PYTHONPATH": path}) as group:
        printed = group.wait(SECONDS)
    told = [re.findall(r"^SAME (.*)$", output, re.MULTILINE) for output in printed]
    assert all(one == told[0] for one in told), told
    assert [one.split()[0] for one in told[0]] == [str(workers * devices)]
