"""Rank of this worker, before a strategy is made."""

import subprocess
import sys

import pytest

import tfscale
from tests.launch.processes import ROOT
from tests.launch.test_sources import MASTER, mpich, open_mpi, srun, tf_config, torchrun
from tfscale.cluster import this_worker

CHIEF = {"chief": ["h0:1"], "worker": ["h1:1", "h2:1"]}
LAUNCHERS = {
    "alone": ({}, 0),
    "an empty TF_CONFIG": ({"TF_CONFIG": ""}, 0),
    "TF_CONFIG": (tf_config(2), 2),
    "a chief": (tf_config(0, CHIEF, "chief"), 0),
    "a worker beside a chief": (tf_config(1, CHIEF), 2),
    "torchrun": (torchrun(3), 3),
    "Open MPI": (open_mpi(2) | MASTER, 2),
    "MPICH": (mpich(1) | MASTER, 1),
    "Slurm": (srun(3, node=1, local=1), 3),
    "Slurm and what the strategy makes of it": (srun(3, node=1, local=1) | tf_config(3), 3),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_worker_knows_its_number(launcher, monkeypatch):
    variables, expected = LAUNCHERS[launcher]
    monkeypatch.setattr(this_worker.os, "environ", variables)
    assert tfscale.rank() == expected
    assert tfscale.is_first() == (expected == 0)


def test_contradictions_are_refused(monkeypatch):
    monkeypatch.setattr(this_worker.os, "environ", srun(3, node=1, local=1) | tf_config(2))
    with pytest.raises(ValueError, match="TF_CONFIG and Slurm contradict each other"):
        tfscale.rank()


def test_a_resolver_of_the_program_counts(monkeypatch):
    import tensorflow as tf

    from tfscale.native.group import resolver_of

    monkeypatch.setattr(this_worker, "_rank_of_resolver", None)
    workers = tf.train.ClusterSpec({"worker": ["localhost:1", "localhost:2"]})
    simple = tf.distribute.cluster_resolver.SimpleClusterResolver
    resolver_of(simple(workers, task_type="worker", task_id=1))
    assert tfscale.rank() == 1 and not tfscale.is_first()


def test_it_needs_no_tensorflow():
    code = "import sys, tfscale; tfscale.rank(); assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
