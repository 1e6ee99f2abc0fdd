"""The two halves of an all-reduce, as separate collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tfscale.collectives.cost import Cost, Machine
from tfscale.collectives.moves import Goal, Kind, Move
from tfscale.collectives.schedule import Schedule, checked_schedule


def reduce_scatter(schedule: Schedule) -> Schedule:
    """Return the first half: rank c gets the sum of chunk c, and no other rank gets any.

    Args:
        schedule: an all-reduce in which rank c owns chunk c.

    Example:
        >>> from tfscale.collectives import direct, reduce_scatter
        >>> reduce_scatter(direct(4)).name
        'reduce_scatter(direct)'
    """
    return _half("reduce_scatter", checked_schedule(schedule))


def all_gather(schedule: Schedule) -> Schedule:
    """Return the second half: rank c starts with chunk c, and all ranks get all chunks.

    Args:
        schedule: an all-reduce in which rank c owns chunk c.

    Example:
        >>> from tfscale.collectives import all_gather, ring
        >>> all_gather(ring(4)).verify().rounds
        3
    """
    return _half("all_gather", checked_schedule(schedule))


def has_halves(schedule: Schedule) -> bool:
    """Return whether a reduce-scatter and an all-gather can be made of a schedule.

    Example:
        >>> from tfscale.collectives import ring, tree
        >>> has_halves(ring(4)), has_halves(tree(4))
        (True, False)
    """
    try:
        _half("reduce_scatter", schedule)
    except ValueError:
        return False
    return True


def _half(goal: Goal, schedule: Schedule) -> Schedule:
    if schedule.goal != "all_reduce":
        raise ValueError(f"{schedule.name} has the goal {schedule.goal}; expected an all-reduce")
    if schedule.chunks != schedule.ranks:
        raise _unfit(goal, schedule, f"it has {schedule.chunks} chunks for {schedule.ranks} ranks")

    def build(rank: int) -> Iterator[Move]:
        final: set[int] = set()
        owned: list[int] = []
        for move in schedule.build(rank):
            span = range(move.first, move.last)
            if move.kind is Kind.FINALISE:
                owned.extend(span)
                yield move
            if move.kind in (Kind.FINALISE, Kind.KEEP):
                final.update(span)
            shares = move.kind is Kind.KEEP or (move.kind is Kind.SEND and span[0] in final)
            if move.kind is not Kind.FINALISE and shares == (goal == "all_gather"):
                yield move
        if owned != [rank]:
            raise _unfit(goal, schedule, f"rank {rank} owns the chunks {owned}")

    for rank in range(min(2, schedule.ranks)):  # other ranks are checked when they are built
        list(build(rank))
    name = f"{goal}({schedule.name})"
    cost = schedule.cost and _half_cost(goal, schedule.cost)
    return dataclasses.replace(schedule, name=name, build=build, goal=goal, cost=cost)


def _half_cost(goal: Goal, whole: Cost) -> Cost:
    """Return the cost of a half: both halves send the same messages, and only the first adds."""

    def seconds(nbytes: float, machine: Machine, gamma: float) -> float:
        sharing = whole.time(nbytes, machine) / 2
        return sharing if goal == "all_gather" else whole.time(nbytes, machine, gamma) - sharing

    return Cost(whole.rounds // 2, whole.sent / 2, whole.received / 2, seconds, whole.exact)


def _unfit(goal: Goal, schedule: Schedule, reason: str) -> ValueError:
    return ValueError(
        f"cannot make {goal} of {schedule.name}: rank c must own chunk c, but {reason}. "
        "ring, direct, and halving with a power of two of ranks qualify."
    )
