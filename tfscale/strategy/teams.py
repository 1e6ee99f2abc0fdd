"""Teams of replicas: those that make their steps together, and those along axes of a grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfscale.cluster import addresses
from tfscale.collectives import Schedule
from tfscale.compression.adaptive import Adaptive
from tfscale.compression.method import Wire
from tfscale.compression.policy import MethodPolicy
from tfscale.exchange.collective_schedules import Algorithm, CollectiveSchedules, of_groups
from tfscale.exchange.team import Team
from tfscale.native.group import tasks_of
from tfscale.strategy.workers import shutdown
from tfscale.sync.rule import Rule


@dataclasses.dataclass(frozen=True, eq=False)
class Teams:
    """Division of all replicas into teams of one size, of which each does something together.

    Args:
        team: a ``Team`` whose communicator i belongs to the team of this process's replica i; None
            if each replica is alone.
        ranks: ranks of each team.
    """

    team: Team | None
    ranks: Sequence[Sequence[int]]

    @property
    def size(self) -> int:
        """Number of replicas of a team."""
        return len(self.ranks[0])

    @property
    def number(self) -> int:
        """Number of teams."""
        return len(self.ranks)

    @property
    def spans_workers(self) -> bool:
        """Whether a team has replicas of several workers."""
        return self.team is not None and len(self.team.communicators) < self.size

    @classmethod
    def of(
        cls,
        extended: Any,
        ranks: Sequence[Sequence[int]],
        algorithm: Algorithm,
        schedules: CollectiveSchedules,
    ) -> Teams:
        """Divide the replicas of a strategy into teams, whose ranks learn how others' programs end.

        Args:
            extended: the strategy's ``extended``.
            ranks: ranks of each team; all teams have one size.
            algorithm: the user's argument ``algorithm``, for the sums within teams.
            schedules: schedules of the sums over all replicas.
        """
        size = len(ranks[0])
        if size == 1:
            return cls(None, ranks)
        first, devices = extended.first_rank, len(extended.devices)
        mine = range(first, first + devices)
        own = [each for each in ranks if not set(each).isdisjoint(mine)]
        parts = [extended.group.part(each) for each in own]
        for part in parts:
            part.join()  # only ranks that have joined learn of another one's failure
        shutdown.announce(parts, extended.groups)
        within_workers = all(len({rank // devices for rank in each}) == 1 for each in ranks)
        team = Team(parts[0], of_groups(algorithm, schedules, size, size if within_workers else 0))
        of_rank = {
            rank: communicator
            for each, part in zip(own, parts, strict=True)
            for rank, communicator in zip(
                [rank for rank in each if rank in mine], part.communicators, strict=True
            )
        }
        team.communicators = [of_rank[rank] for rank in mine]
        return cls(team, ranks)


def size_of_teams(rule: Rule, extended: Any, algorithm: Algorithm, policy: MethodPolicy) -> int:
    """Return how many replicas make each step together.

    Args:
        rule: the user's sync rule.
        extended: the strategy's ``extended``.
        algorithm: the user's argument ``algorithm``.
        policy: methods by which each team sums its gradients.

    Raises:
        ValueError: the teams would not work with the replicas, the algorithm or the methods.
    """
    replicas = extended.number_of_replicas
    if replicas == 1:
        return 1
    hosts = ["localhost"]
    if extended.number_of_workers > 1:
        hosts = [addresses.split(at)[0] for _, at in tasks_of(extended.cluster_resolver)]
    size = rule.team_size(len(extended.devices), hosts)
    if 1 < size < replicas:
        needed = f"for the {size} ranks of a group, and for all {replicas} ranks"
        refuse_schedule(algorithm, f"sync={rule!r} needs two schedules: {needed}")
        _refuse_methods(rule, policy)
    return size


def refuse_schedule(algorithm: Algorithm, reason: str) -> None:
    """Raise if the user passed one schedule where sums run over several numbers of ranks.

    Args:
        algorithm: the user's argument ``algorithm``.
        reason: says what sums over several numbers of ranks.
    """
    if isinstance(algorithm, Schedule):
        raise ValueError(
            f"the schedule {algorithm.name} is for {algorithm.ranks} ranks, but {reason}. Pass the "
            "name of an algorithm, or a function from a number of ranks to a schedule"
        )


def _refuse_methods(rule: Rule, policy: MethodPolicy) -> None:
    """Raise if teams would choose methods, or draw random numbers, differently and must not."""
    adaptive = next((one for one in policy.methods if isinstance(one, Adaptive)), None)
    if adaptive is not None:
        raise ValueError(
            f"method={adaptive!r} chooses a method during training, and with sync={rule!r} each "
            "group could choose a different one. Name one method instead, such as "
            "method=tfscale.compression.PowerSGD(4)"
        )
    between = rule.round_rule.policy.methods
    draw = [one for one in between if one.random and not isinstance(one, Wire)]
    if draw and any(one.random for one in policy.methods):
        raise ValueError(
            f"the rule's method {draw[0]!r} and the strategy's method draw random numbers from the "
            "same seed, but groups make different numbers of draws. Use a method without random "
            "numbers, such as PowerSGD or TopK, for one of the two"
        )
