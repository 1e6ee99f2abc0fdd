"""Teams of replicas: each makes its steps together, and all teams agree at the end of a round."""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Teams:
    """Division of all replicas into teams of one size, of which each makes its steps together.

    Args:
        size: number of replicas of a team.
        number: number of teams.
        team: a ``Team`` whose communicator i belongs to the team of this process's replica i; None
            if ``size`` is 1, since each replica then makes its steps alone.
    """

    size: int
    number: int
    team: Team | None

    @property
    def spans_workers(self) -> bool:
        """Whether a team has replicas of several workers."""
        return self.team is not None and len(self.team.communicators) < self.size

    @classmethod
    def of(
        cls, extended: Any, size: int, algorithm: Algorithm, schedules: CollectiveSchedules
    ) -> Teams:
        """Divide the replicas of a strategy into teams.

        Args:
            extended: the strategy's ``extended``, with several replicas.
            size: number of replicas of each team.
            algorithm: the user's argument ``algorithm``, for the sums within teams.
            schedules: schedules of the sums over all replicas.
        """
        number = extended.number_of_replicas // size
        if size == 1:
            return cls(size, number, None)
        teams = [list(range(start, start + size)) for start in range(0, number * size, size)]
        return cls(size, number, divided(extended, teams, algorithm, schedules))


def divided(
    extended: Any, teams: list[list[int]], algorithm: Algorithm, schedules: CollectiveSchedules
) -> Team:
    """Return an object for each replica's own team, whose ranks learn how the others' programs end.

    Args:
        extended: the strategy's ``extended``.
        teams: ranks of each team; all teams have one size.
        algorithm: the user's argument ``algorithm``.
        schedules: schedules of the sums over all replicas.
    """
    first, devices = extended.first_rank, len(extended.devices)
    mine = range(first, first + devices)
    own = [ranks for ranks in teams if not set(ranks).isdisjoint(mine)]
    parts = [extended.group.part(ranks) for ranks in own]
    for part in parts:
        part.join()  # only ranks that have joined learn of another one's failure
    shutdown.announce(parts, extended.groups)
    size = len(teams[0])
    within_workers = all(len({rank // devices for rank in ranks}) == 1 for ranks in teams)
    team = Team(parts[0], of_groups(algorithm, schedules, size, size if within_workers else 0))
    of_rank = {
        rank: communicator
        for ranks, part in zip(own, parts, strict=True)
        for rank, communicator in zip(
            [rank for rank in ranks if rank in mine], part.communicators, strict=True
        )
    }
    team.communicators = [of_rank[rank] for rank in mine]
    return team


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
        _refuse_schedule(rule, algorithm, size, replicas)
        _refuse_methods(rule, policy)
    return size


def _refuse_schedule(rule: Rule, algorithm: Algorithm, size: int, replicas: int) -> None:
    """Raise if the user passed one schedule where sums run over two different numbers of ranks."""
    if isinstance(algorithm, Schedule):
        raise ValueError(
            f"the schedule {algorithm.name} is for {algorithm.ranks} ranks, but sync={rule!r} "
            f"needs two schedules: for the {size} ranks of a group, and for all {replicas} ranks. "
            "Pass the name of an algorithm, or a function from a number of ranks to a schedule"
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
