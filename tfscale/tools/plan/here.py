"""A model and a cluster as measured where the command runs: ``tfscale plan MODEL --here``."""

from __future__ import annotations

import dataclasses
import socket
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale import is_first
from tfscale.collectives import Link
from tfscale.collectives.choose import Chooser
from tfscale.collectives.cost import Machine
from tfscale.plan import Cluster, Host, Measured, measured
from tfscale.strategy import ScaleStrategy
from tfscale.tools.doctor.machine import free_memory


@dataclasses.dataclass(frozen=True)
class Here:
    """A model and the cluster of a job, both as measured.

    Args:
        model: the model, as this worker has measured it.
        cluster: the workers of this job; each counts as a host.
        speaks: whether this worker prints what was found.
    """

    model: Measured
    cluster: Cluster
    speaks: bool


def measure(make: Callable[[], Any], batch: int) -> Here:
    """Measure this machine, or all workers of the job that this process belongs to.

    All workers must call this together. They time their layers at the same moment, so what they
    share counts as shared.

    Args:
        make: function that returns a built Keras model. It is called after the workers have met.
        batch: samples of a step, of all devices together.
    """
    strategy = ScaleStrategy()
    found = measured(make(), max(1, batch // strategy.num_replicas_in_sync))
    name = float(zlib.crc32(socket.gethostname().encode()))
    own = [found.rate, found.launch, found.update, free_memory(), name]
    rows = _of_all_replicas(strategy, own)
    chooser = strategy.reducer.team.schedules
    machine = chooser.machine if isinstance(chooser, Chooser) else Link(0.0, 0.0)
    gamma = chooser.gamma if isinstance(chooser, Chooser) else 0.0
    devices = len(strategy.extended.worker_devices)
    inner, between = _links(machine, devices)
    hosts = [
        Host(devices, row[3] / rows[:, 4].tolist().count(row[4]), row[0], inner, 0.0, *row[1:3])
        for row in rows[::devices].tolist()
    ]
    return Here(found, Cluster(hosts, between, gamma=gamma), speaks=is_first())


def _of_all_replicas(strategy: ScaleStrategy, own: Sequence[float]) -> np.ndarray[Any, Any]:
    """Return the numbers of each replica's worker, as rows."""

    @tf.function
    def gathered() -> Any:
        numbers = tf.constant([own], tf.float64)
        return tf.distribute.get_replica_context().all_gather(numbers, axis=0)

    found = strategy.experimental_local_results(strategy.run(gathered))
    return np.asarray(found[0])


def _links(machine: Machine, devices: int) -> tuple[Link, Link]:
    """Return the link between the devices of a worker, and the link of a worker to the others.

    The second one was measured while all devices of a worker used it, each for its own group.
    """
    if isinstance(machine, Link):
        return (machine, machine) if devices > 1 else (Link(0.0, 0.0), machine)
    outer = machine.outer
    return machine.inner, Link(outer.alpha, outer.beta / devices)
