"""Speed of the links between the ranks: alpha, beta and gamma, measured at the start.

Real collectives of a few sizes run through the engine. The cost model says how many alphas, betas
and gammas each collective should take; least squares compute the three numbers from the times.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import logging
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale import collectives
from tfscale.collectives import Cluster, Link, wires
from tfscale.collectives.choose import machine_fields, read_machine
from tfscale.collectives.cost import Cost, Machine
from tfscale.native import Communicator, Group, all_gather, all_reduce, broadcast, trust
from tfscale.native.build import cache_folder
from tfscale.support import records
from tfscale.support.files import make_private_folder
from tfscale.support.version import __version__

_COUNTS = (1_000, 100_000, 1_000_000)  # float32 numbers in a collective
_IN_A_ROW = 2  # collectives in one call, so that the call itself counts less
_ROUNDS = (3, 50)  # smallest and largest number of measurements


@dataclasses.dataclass(frozen=True)
class LinkMeasurement:
    """Parameters of the cost model, equal to the last bit on all ranks.

    Args:
        machine: a ``Link``, or a ``Cluster`` if several workers have several devices.
        gamma: seconds to decode and add one byte that came over the wire.
        source: ``"measured at start"``, or the path of the cache file.
    """

    machine: Machine
    gamma: float
    source: str = "measured at start"


def measure(group: Group, seconds: float = 1.0, wire: str = "fp32") -> LinkMeasurement:
    """Time collectives for about ``seconds``; all processes of the group must call this together.

    A worker with several devices counts as a group of the ``Cluster``. The times between workers
    are measured while all devices of a worker send to other workers, as in a hierarchical
    all-reduce. So the outer beta includes the effect of a shared network card.
    """
    if group.ranks == 1:
        return LinkMeasurement(Link(0.0, 0.0), 0.0)
    workers = _workers(group)
    if len(workers) == 1 or len(workers) == group.ranks:
        alpha, beta, gamma = _solve(group, _experiments([group], 0, wire), seconds)
        return LinkMeasurement(Link(alpha, beta), gamma)
    inner = _experiments([_own_worker(group, workers)], 0, wire)
    outer = _experiments(_across_workers(group, workers), 1, wire)
    *links, gamma = _solve(group, inner + outer, seconds)
    sizes = [len(ranks) for ranks in workers]
    return LinkMeasurement(Cluster(sizes, Link(*links[:2]), Link(*links[2:])), gamma)


def cached(group: Group, seconds: float = 1.0, wire: str = "fp32") -> LinkMeasurement:
    """Return an earlier measurement from the cache, or else measure the links.

    The earlier measurement must be for the same hosts, devices, transports, wire and versions, and
    counts only if all ranks hold the same entry.
    """
    group.join()  # before, the transports are unknown
    file = cache_folder().resolve() / "links" / f"{_key(group, wire)}.json"
    entry = _read(file, group.ranks)
    if _all_agree(group, entry):
        assert entry is not None  # _all_agree has checked this
        return entry
    measured = measure(group, seconds, wire)
    _write(file, measured)
    return measured


# ---------------------------------------------------------------------------- groups


def _workers(group: Group) -> list[list[int]]:
    """Return the ranks of each worker."""
    devices = group.communicators[0].devices
    by_worker: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        by_worker.setdefault(device.rpartition("/device:")[0], []).append(rank)
    return list(by_worker.values())


def _own_worker(group: Group, workers: list[list[int]]) -> Group:
    mine = {communicator.rank for communicator in group.communicators}
    return group.part(next(ranks for ranks in workers if mine.issuperset(ranks)))


def _across_workers(group: Group, workers: list[list[int]]) -> list[Group]:
    """Return one group of all workers' first devices, one of their second devices, and so on."""
    return [group.part(ranks) for ranks in zip(*workers, strict=False)]


# ---------------------------------------------------------------------------- times


@dataclasses.dataclass(frozen=True)
class _Experiment:
    """A collective whose time a formula predicts and the clock measures."""

    cost: Cost
    nbytes: int
    link: int  # index of the machine's link that the collective uses
    call: Callable[[], Any]

    def row(self, links: int) -> list[float]:
        """Return how many times the collective takes each link's alpha and beta, and gamma."""
        row = [0.0] * (2 * links + 1)
        row[2 * self.link] = self.cost.time(self.nbytes, Link(1, 0))
        row[2 * self.link + 1] = self.cost.time(self.nbytes, Link(0, 1))
        row[-1] = self.cost.time(self.nbytes, Link(0, 0), 1)
        return row

    def seconds(self) -> float:
        start = time.perf_counter()
        self.call()
        return (time.perf_counter() - start) / _IN_A_ROW


def _experiments(groups: list[Group], link: int, wire: str) -> list[_Experiment]:
    """Return collectives that all groups run at the same time.

    A broadcast adds no numbers, and halving has fewer rounds than a ring. These differences make
    it possible to solve for alpha, beta and gamma. (By their closed forms, the times of all three
    collectives are linear in these.)
    """
    ranks = groups[0].ranks
    if ranks == 1:
        return []
    costs = {
        name: collectives.resolve(name, ranks).cost for name in ("ring", "halving")[: ranks - 1]
    }
    costs["broadcast"] = collectives.broadcast(ranks).cost
    return [
        _Experiment(cost, wires.nbytes(wire, count), link, _call(groups, name, wire, count))
        for name, cost in costs.items()
        for count in _COUNTS
        if cost is not None
    ]


def _call(groups: list[Group], name: str, wire: str, count: int) -> Callable[[], Any]:
    def body(communicator: Communicator) -> Any:
        x = tf.zeros([count])
        for turn in range(_IN_A_ROW):
            label = f"link/{name}/{count}/{turn}"
            if name == "broadcast":
                x = broadcast(x, communicator, wire=wire, name=label)
            else:
                x = all_reduce(x, communicator, schedule=name, wire=wire, name=label)
        return x[:1]

    return _function(groups, body)


def _function(groups: list[Group], body: Callable[[Communicator], Any]) -> Callable[[], list[Any]]:
    """Return a function that runs a body on all devices of this process.

    The function returns the results as numpy arrays.
    """

    @tf.function(autograph=False)
    def run() -> list[Any]:
        results = []
        for communicator in itertools.chain(*(group.communicators for group in groups)):
            with tf.device(communicator.device):
                results.append(body(communicator))
        return results

    # Calls of ``run`` itself would make TensorFlow warn that similar functions are traced again.
    trace = functools.cache(run.get_concrete_function)
    return lambda: [result.numpy() for result in trace()()]


# ------------------------------------------------------------------------- equations


def _solve(group: Group, experiments: list[_Experiment], seconds: float) -> list[float]:
    """Return alpha and beta of each link, and gamma."""
    for experiment in experiments:
        experiment.call()  # the first call traces and connects, so it does not count
    once = sum(experiment.seconds() * _IN_A_ROW for experiment in experiments)
    (rounds,) = _of_rank_zero(group, [max(_ROUNDS[0], min(seconds // once, _ROUNDS[1]))])
    times = [[e.seconds() for e in experiments] for _ in range(int(rounds))]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    links = 1 + max(experiment.link for experiment in experiments)
    rows = [experiment.row(links) for experiment in experiments]
    return _of_rank_zero(group, _least_squares(rows, medians))


def _least_squares(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Return the numbers, none below 0, that fit the times with the least relative error.

    There are few unknowns, so the function tries every set of unknowns that are not 0.
    """
    matrix = np.array(rows) / np.array(times)[:, None]
    sizes = np.linalg.norm(matrix, axis=0)
    best, least = np.zeros(matrix.shape[1]), float("inf")
    for used in itertools.product([False, True], repeat=matrix.shape[1]):
        some = matrix[:, used] / sizes[list(used)]
        found = np.linalg.lstsq(some, np.ones(len(times)), rcond=None)[0]
        error = float(np.linalg.norm(some @ found - 1))
        if np.all(found >= 0) and error < least:
            best, least = np.zeros_like(best), error
            best[list(used)] = found / sizes[list(used)]
    return [float(number) for number in best]


def _of_rank_zero(group: Group, numbers: Sequence[float]) -> list[float]:
    own = np.array(numbers, np.float64)
    given = _function([group], lambda c: broadcast(own, c, name="link/numbers"))()
    return [float(number) for number in given[0]]


# ----------------------------------------------------------------------------- cache


def _key(group: Group, wire: str) -> str:
    """Return the key of the cache.

    The key leaves ports out: they change from job to job, and say nothing about the links.
    """
    peers = [re.sub(r":\d+(,|$)", r"\1", peer) for peer in group.peers]
    devices = group.communicators[0].devices
    ways = [way.partition(" to ")[0] for way in group.communicators[0].ways()]
    over = [group.transport, ways]
    whole = [platform.node(), peers, devices, over, wire, tf.version.VERSION, __version__]
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:16]


def _read(file: Path, ranks: int) -> LinkMeasurement | None:
    try:
        with trust.OpenFile(file) as opened:
            if reason := opened.doubt():
                raise records.RecordError(f"{reason}, so another user may have written {file}")
            entry = records.Record.read(file, opened.content)
        return LinkMeasurement(read_machine(entry, ranks), entry.number("gamma"), str(file))
    except FileNotFoundError:
        return None
    except (OSError, records.RecordError) as error:
        _warn_once(f"tfscale measures the links again, as their cache cannot be read: {error}")
        return None


def _write(file: Path, measured: LinkMeasurement) -> None:
    try:
        make_private_folder(file.parent)
        trust.keep_others_out(file.parent)  # an older version may have left it open
        if reason := trust.doubt_of_folders(file.parent):
            raise PermissionError(f"{reason}, so another user could exchange the cache's files")
        records.write(file, _fields(measured), private=True)
    except OSError as error:
        _warn_once(f"the next run measures the links again, as no cache can be written: {error}")


def _fields(measured: LinkMeasurement) -> dict[str, Any]:
    return {**machine_fields(measured.machine), "gamma": measured.gamma}


def _all_agree(group: Group, entry: LinkMeasurement | None) -> bool:
    digest = hashlib.sha256(repr(entry and _fields(entry)).encode()).digest()
    number = 0 if entry is None else 1 + int.from_bytes(digest[:7], "big")
    own = np.array([number], np.int64)
    every = _function([group], lambda c: all_gather(own, c, name="link/cache"))()[0]
    return bool(number and np.all(every == number))


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger("tfscale").warning(message)
