"""Algorithms by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfscale.collectives.central import central
from tfscale.collectives.direct import direct
from tfscale.collectives.halving import halving
from tfscale.collectives.hierarchical import hierarchical
from tfscale.collectives.programs import checked_ranks
from tfscale.collectives.proof import proven, trusted
from tfscale.collectives.ring import ring
from tfscale.collectives.schedule import Schedule
from tfscale.collectives.tree import tree
from tfscale.support import arguments

ALGORITHMS: dict[str, Callable[[int], Schedule]] = {
    "ring": ring,
    "tree": tree,
    "halving": halving,
    "direct": direct,
    "hierarchical": hierarchical,
    "central": central,
}


def resolve(algorithm: str | Callable[[int], Schedule] | Schedule, ranks: int) -> Schedule:
    """Make a schedule for ``ranks`` from the user's ``algorithm``.

    A schedule that is not one of tfscale's own is verified first.

    Args:
        algorithm: a name from ``ALGORITHMS``; a function from a number of ranks to
            a schedule; or a schedule.
        ranks: how many ranks take part.

    Raises:
        ScheduleError: a user's schedule is wrong, or takes too long to build.

    Example:
        >>> resolve("halving", 8).chunks
        8
    """
    ranks = checked_ranks(ranks)
    algorithm = checked_algorithm(algorithm)
    if isinstance(algorithm, str):
        return trusted(ALGORITHMS[algorithm](ranks))
    return proven(functools.partial(_made, algorithm, ranks), algorithm)


def _made(algorithm: Callable[[int], Schedule] | Schedule, ranks: int) -> Schedule:
    schedule = algorithm if isinstance(algorithm, Schedule) else algorithm(ranks)
    if not isinstance(schedule, Schedule):
        raise TypeError(f"{algorithm!r} must return a Schedule, it returned {schedule!r}")
    if schedule.ranks != ranks:
        raise ValueError(f"{schedule.name} is for {schedule.ranks} ranks, but {ranks} take part")
    if schedule.goal != "all_reduce":
        raise ValueError(
            f"{schedule.name} is a schedule of {schedule.goal}; expected one of all_reduce"
        )
    return trusted(schedule) if algorithm in ALGORITHMS.values() else schedule


def checked_algorithm(algorithm: Any, name: str = "algorithm", *others: str) -> Any:
    """Return an algorithm, or raise; ``others`` are names that the caller accepts."""
    if isinstance(algorithm, Schedule) or callable(algorithm):
        return algorithm
    other = "a function from ranks to a Schedule, or a Schedule"
    return arguments.choice(algorithm, name, (*others, *ALGORITHMS), other)
