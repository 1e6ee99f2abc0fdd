"""Groups of replicas that make each step together, as one larger replica would."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from tfscale.cluster import addresses
from tfscale.collectives import Schedule
from tfscale.compression.adaptive import Adaptive
from tfscale.compression.method import Wire
from tfscale.compression.policy import MethodPolicy
from tfscale.exchange.collective_schedules import Algorithm, CollectiveSchedules, of_groups
from tfscale.exchange.team import Team
from tfscale.native import Group
from tfscale.native.group import tasks_of
from tfscale.sync import Hierarchical
from tfscale.sync.rule import Rule

if TYPE_CHECKING:
    from tfscale.strategy.extended import Extended


@dataclasses.dataclass(frozen=True)
class Groups:
    """Division of all replicas into groups of one size.

    Args:
        size: number of replicas of each group.
        parts: groups that have replicas of this process.
        team: each replica of this process, with its own group.
    """

    size: int
    parts: list[Group]
    team: Team

    @classmethod
    def of(
        cls, extended: Extended, size: int, algorithm: Algorithm, schedules: CollectiveSchedules
    ) -> Groups:
        """Divide the replicas of a strategy into groups.

        Args:
            extended: the strategy's ``extended``, with several replicas.
            size: number of replicas of each group.
            algorithm: the user's argument ``algorithm``, for the sums within groups.
            schedules: schedules of the sums over all replicas.
        """
        first, devices = extended.first_rank, len(extended.devices)
        starts = sorted({rank - rank % size for rank in range(first, first + devices)})
        assert extended.group is not None
        parts = [extended.group.part(range(start, start + size)) for start in starts]
        for part in parts:
            part.join()  # only ranks that have joined learn of another one's failure
        team = Team(parts[0], of_groups(algorithm, schedules, size, devices))
        team.communicators = [one for part in parts for one in part.communicators]
        return cls(size, parts, team)


def size_of(rule: Hierarchical, extended: Extended) -> int:
    """Return how many replicas each group has.

    Raises:
        ValueError: groups would differ in size, or a group would be neither a part of one worker
            nor some whole workers.
    """
    devices, replicas = len(extended.devices), extended.number_of_replicas
    if rule.group is None:
        return devices if devices > 1 else _workers_of_a_host(rule, extended)
    divides = devices % rule.group == 0 or rule.group % devices == 0
    if replicas % rule.group or not divides:
        workers = extended.number_of_workers
        raise ValueError(
            f"sync={rule!r} asks for groups of {rule.group} replicas, and there are {replicas}: "
            f"{devices} on each of {workers} workers. All groups must have as many, each of them "
            "a part of one worker, or some whole workers"
        )
    return rule.group


def _workers_of_a_host(rule: Hierarchical, extended: Extended) -> int:
    if extended.number_of_workers == 1:
        return 1
    hosts = [addresses.split(at)[0] for _, at in tasks_of(extended.cluster_resolver)]
    runs = [(host, len(list(run))) for host, run in itertools.groupby(hosts)]
    sizes = {size for _, size in runs}
    if len(sizes) > 1 or len(runs) > len(set(hosts)):
        said = ", ".join(f"{size} on {host}" for host, size in runs)
        raise ValueError(
            f"sync={rule!r} takes the workers of a host for a group, and hosts must have as many, "
            f"one after the other; here are {said}. Say how many make a group: group=2"
        )
    return sizes.pop()


def refuse_schedule(rule: Rule | Hierarchical, algorithm: Algorithm, extended: Extended) -> None:
    """Raise if the user passed one schedule where sums run over two different numbers of ranks.

    Args:
        rule: rule by which replicas agree.
        algorithm: the user's argument ``algorithm``.
        extended: the strategy's ``extended``.
    """
    if not isinstance(rule, Hierarchical) or not isinstance(algorithm, Schedule):
        return
    size, replicas = size_of(rule, extended), extended.number_of_replicas
    if 1 < size < replicas:
        raise ValueError(
            f"{algorithm.name} is for {algorithm.ranks} ranks, and with sync={rule!r} a group has "
            f"{size} ranks, which sum in each step, and all {replicas} ranks agree at the end of a "
            "round. Pass a function that makes the schedule for a number of ranks, or a name"
        )


def refuse_methods(rule: Hierarchical, policy: MethodPolicy) -> None:
    """Raise if groups would choose methods, or draw random numbers, differently and must not.

    Args:
        rule: rule by which groups agree.
        policy: methods by which each group sums its gradients.
    """
    adaptive = next((one for one in policy.methods if isinstance(one, Adaptive)), None)
    if adaptive is not None:
        raise ValueError(
            f"method={adaptive!r} chooses while it trains, and with sync={rule!r} each group would "
            "choose otherwise. Name the method that gradients are sent by within groups"
        )
    draw = [one for one in rule.outer.policy.methods if one.random and not isinstance(one, Wire)]
    if draw and any(one.random for one in policy.methods):
        raise ValueError(
            f"{draw[0]!r}, by which groups agree, and the method of the strategy, by which each "
            "sums its gradients, draw from the same seed, and groups may draw more or less often. "
            "Take another method for one of the two"
        )
