"""Trainings under a real Slurm, started as docs/clusters.md says."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from tests import warm
from tests.engines.slurm import PATIENCE, Slurm, missing
from tests.launch.processes import ROOT
from tests.launch.test_cluster import FIT, PLAIN, alone, trained

PROGRAMS = Path(__file__).parent / "programs"
TRAIN = str(PROGRAMS / "train.py")
PAGE = ROOT / "docs" / "clusters.md"
pytestmark = pytest.mark.timeout(6 * PATIENCE)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Start Slurm; fail on CI's machines if it is not installed."""
    absent = missing()
    if absent and not os.environ.get("CI"):
        pytest.skip(f"no {absent}: sudo apt-get install slurm-wlm munge")
    assert not absent
    with Slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def job():
    """The page's batch script."""
    (script,) = re.findall(r"^```bash\n(#!.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert "python train.py" in script
    return script


def test_srun_trains_as_one_device_does(slurm):
    ran = slurm.run("srun", "-n", "2", "python", FIT)
    assert ran.returncode == 0, ran
    replicas, weights = trained(ran.stdout, 2)
    assert replicas == 2 and np.allclose(weights, alone(), atol=1e-6)
    told = "cluster of 2 workers found in the variables of Slurm; this is worker {} at {}:"
    for task in (0, 1):
        assert told.format(task, slurm.node) in ran.stderr


def test_a_task_that_fails_is_named_by_the_others(slurm):
    ran = slurm.run("srun", "-n", "2", "python", str(PROGRAMS / "fails.py"))
    assert ran.returncode == 1, ran
    assert f"rank 1 (worker 1 at {slurm.node}:" in ran.stderr, ran
    assert "gave up: its program failed: KeyError: 'no such row'" in ran.stderr


def test_a_job_goes_on_after_a_warning_and_after_a_preemption(slurm, job, tmp_path):
    """First by a signal, as ``--signal=TERM@120`` sends it to all tasks, and the script's
    ``scontrol requeue``; then Slurm takes the node for another job, and requeues by itself.
    """
    script = slurm.folder / "train.sh"
    script.write_text(job)
    (slurm.folder / "train.py").symlink_to(TRAIN)
    machine = ("--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=4", "--gpus-per-node=0")
    number = slurm.submit(*machine, str(script))
    slurm.until("three epochs are trained", lambda: epochs(slurm) == [0, 1, 2])
    slurm.run("scancel", "--signal=TERM", number)
    slurm.until("five epochs are trained", lambda: epochs(slurm) == [0, 1, 2, 3, 4])
    slurm.submit("--partition=urgent", "--exclusive", "--wrap=true")
    slurm.until("the job has ended", lambda: slurm.state(number) in ("COMPLETED", "FAILED"))
    output = (slurm.folder / f"slurm-{number}.out").read_text()
    assert slurm.state(number) == "COMPLETED", output
    assert epochs(slurm) == list(range(8))
    replicas, weights = trained(output, 2)
    assert replicas == 2 and np.allclose(weights, uninterrupted(tmp_path), atol=1e-6)


def epochs(slurm):
    """Return the epochs that have ended."""
    file = slurm.folder / "EPOCHS"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def uninterrupted(folder):
    """The weights that one device trains."""
    environment = {**PLAIN, "SLURM_RESTART_COUNT": "2"}
    ran = warm.run([TRAIN], environment=environment, cwd=folder, seconds=PATIENCE)
    return trained(ran.stdout)[1]
