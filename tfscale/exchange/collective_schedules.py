"""Schedules of a strategy's buckets: the one that the user named, or one for each size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tfscale.collectives import Cluster, Schedule
from tfscale.collectives.choose import Choice, Chooser
from tfscale.collectives.cost import slowest
from tfscale.collectives.registry import resolve
from tfscale.collectives.wires import LOSSLESS
from tfscale.compression.method import Price
from tfscale.exchange.link import cached
from tfscale.native import Group

AUTO = "auto"

_USUAL_BUCKET = 4 << 20
_BUCKETS = (1 << 20, 32 << 20)  # smallest and largest, in bytes
_LATENCY = 0.2  # share of a bucket's time that may be latency
Algorithm = str | Schedule | Callable[[int], Schedule]


class Fixed:
    """One schedule for all sizes."""

    def __init__(self, algorithm: Algorithm, ranks: int) -> None:
        self._schedule = resolve(algorithm, ranks)

    def choose(self, wire_bytes: int) -> Choice:
        """Return the user's schedule, whatever the size."""
        return Choice(self._schedule.name, 0.0, None, None, "asked for")

    def schedule(self, algorithm: str) -> Schedule:
        """Return the only schedule, whatever the name."""
        return self._schedule


CollectiveSchedules = Fixed | Chooser


def of_replicas(
    algorithm: Algorithm, group: Group | None, wire: str, file: str | Path | None
) -> CollectiveSchedules:
    """Return the schedules with which all replicas of a group reduce.

    Args:
        algorithm: the user's choice: ``"auto"`` or a schedule.
        group: group of the replicas; None if there is only one replica.
        wire: the wire that carries most of the bytes.
        file: a file of choices, as ``Chooser.dump`` writes it; None if there is none.
    """
    if group is None:
        return Fixed("ring", 1)
    if file is not None:
        if algorithm != AUTO:
            raise ValueError(
                f'schedule_file={str(file)!r} needs algorithm="auto", got {algorithm!r}: the file '
                'holds the choices of "auto". Leave out one of the two arguments'
            )
        return Chooser.load(file, group.ranks)
    if algorithm != AUTO:
        return Fixed(algorithm, group.ranks)
    chooser = _measured(group, wire)
    if wire != LOSSLESS:
        chooser.lossless = _measured(group, LOSSLESS)
    return chooser


def _measured(group: Group, wire: str) -> Chooser:
    links = cached(group, wire=wire)
    return Chooser(links.machine, links.gamma, group.ranks)


def of_groups(
    algorithm: Algorithm, replicas: CollectiveSchedules, size: int, devices: int
) -> CollectiveSchedules:
    """Return the schedules for groups of ``size`` replicas, each of which reduces by itself.

    Args:
        algorithm: the user's choice: ``"auto"`` or a schedule.
        replicas: the schedules of all replicas.
        size: number of replicas in a group.
        devices: number of replicas on a worker.
    """
    if not isinstance(replicas, Chooser):
        return Fixed(algorithm, size)
    machine = replicas.machine
    if isinstance(machine, Cluster):
        machine = machine.inner if size <= devices else machine.outer
    return Chooser(machine, replicas.gamma, size)


def of_hosts(replicas: CollectiveSchedules, group: Group | None) -> CollectiveSchedules:
    """Return the schedules between one device of each worker.

    These devices send small messages over the outer links.
    """
    if group is None or not isinstance(replicas, Chooser):
        return Fixed("ring", group.ranks if group else 1)
    machine = replicas.machine
    link = machine.outer if isinstance(machine, Cluster) else machine
    return Chooser(link, replicas.gamma, group.ranks)


def price(
    schedules: CollectiveSchedules, ranks: int, reduced: Sequence[int], gathered: Sequence[int]
) -> Price:
    r"""Return the cost of all-reduces and all-gathers: seconds on known links, else bytes.

    In an all-gather of N bytes from each rank, a rank sends and receives :math:`(P-1) N` bytes in
    :math:`P-1` messages.

    Args:
        schedules: the schedules of all ranks.
        ranks: number of ranks.
        reduced: bytes that each rank gives to each all-reduce.
        gathered: bytes that each rank gives to each all-gather.
    """
    if isinstance(schedules, Chooser):
        link = slowest(schedules.machine)
        seconds = sum(map(schedules.predicted, reduced))
        for size in gathered:
            seconds += (ranks - 1) * (link.seconds(size) + schedules.gamma * size)
        return Price(seconds, "seconds")
    sent: float = (ranks - 1) * sum(gathered)
    for size in reduced:
        cost = schedules.schedule(schedules.choose(size).algorithm).cost
        sent += float(cost.sent if cost else 2 * (ranks - 1) / ranks) * size
    return Price(sent, "bytes")


def bucket_bytes(schedules: CollectiveSchedules, ranks: int) -> int:
    r"""Return how many bytes of gradients should share a collective on the measured links.

    A ring takes :math:`2(P-1)(\alpha + \beta N / P)`. Small buckets waste time on
    :math:`\alpha`; large buckets leave nothing to overlap with the backward pass. The result is
    the smallest bucket whose latency is a fifth of its time.
    """
    if not isinstance(schedules, Chooser):
        return _USUAL_BUCKET
    link = slowest(schedules.machine)
    size = ranks * link.alpha / max(link.beta, 1e-15) * (1 - _LATENCY) / _LATENCY
    return round(min(max(size, _BUCKETS[0]), _BUCKETS[1]))
