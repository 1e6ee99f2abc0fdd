"""Algorithms by name."""

from __future__ import annotations

from collections.abc import Callable

from tfscale.collectives.central import central
from tfscale.collectives.direct import direct
from tfscale.collectives.halving import halving
from tfscale.collectives.hierarchical import hierarchical
from tfscale.collectives.ring import ring
from tfscale.collectives.schedule import Schedule
from tfscale.collectives.tree import tree
from tfscale.names import unknown

ALGORITHMS: dict[str, Callable[[int], Schedule]] = {
    "ring": ring,
    "tree": tree,
    "halving": halving,
    "direct": direct,
    "hierarchical": hierarchical,
    "central": central,
}


def resolve(algorithm: str | Callable[[int], Schedule] | Schedule, ranks: int) -> Schedule:
    """Make a schedule for ``ranks`` of what a user passes as ``algorithm``.

    Args:
        algorithm: a name from ``ALGORITHMS``; a function from a number of ranks to
            a schedule; or a schedule.
        ranks: how many ranks take part.

    Example:
        >>> resolve("halving", 8).chunks
        8
    """
    if isinstance(algorithm, Schedule):
        schedule = algorithm
    elif isinstance(algorithm, str):
        schedule = _named(algorithm)(ranks)
    elif callable(algorithm):
        schedule = algorithm(ranks)
    else:
        raise TypeError(
            "an algorithm is a name, a function from ranks to a Schedule, or a Schedule; "
            f"got {algorithm!r}"
        )
    if not isinstance(schedule, Schedule):
        raise TypeError(f"{algorithm!r} must return a Schedule, it returned {schedule!r}")
    if schedule.ranks != ranks:
        raise ValueError(f"{schedule.name} is for {schedule.ranks} ranks, and here are {ranks}")
    return schedule


def _named(name: str) -> Callable[[int], Schedule]:
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]
