"""Simulation of a pipeline's order: when each turn begins and ends.

A rank takes its turns in order, and begins a turn as soon as the ranks before it have finished
their parts and the message has arrived. A message takes ``transfer`` seconds and keeps no rank
busy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from tfscale.plan.pipelines.turns import (
    OrderError,
    Result,
    Turn,
    Turns,
    Work,
    made,
    needed,
)
from tfscale.support import arguments


@dataclasses.dataclass(frozen=True)
class Times:
    """The times of one stage's work on one microbatch.

    Args:
        forward: time of a forward pass.
        backward_input: time to compute the gradient of the stage's input.
        backward_weight: time to compute the gradient of the stage's weights.
        transfer: time of a message between two ranks.
        together: time of a forward and a whole backward pass that run at the same time; by default
            the sum of both.
        shares: for each stage the factor by which all its work is longer; by default 1.
    """

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1
    transfer: float = 0
    together: float | None = None
    shares: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "transfer"):
            arguments.real(getattr(self, name), name, 0, what="a time")
        arguments.optional(arguments.real, self.together, "together", 0, what="a time")

    @property
    def backward(self) -> float:
        """Time of a whole backward pass."""
        return self.backward_input + self.backward_weight

    def table(self, stages: int) -> dict[Work, list[float]]:
        """Return for each kind of work the time of each stage."""
        shares = [1] * stages if self.shares is None else self.shares
        if len(shares) != stages:
            expected = f"one number for each of the {stages} stages, or None"
            raise arguments.wrong(self.shares, "shares", expected)
        times = {
            Work.FORWARD: self.forward,
            Work.BACKWARD: self.backward,
            Work.BACKWARD_INPUT: self.backward_input,
            Work.BACKWARD_WEIGHT: self.backward_weight,
        }
        return {work: [time * share for share in shares] for work, time in times.items()}


class Box(NamedTuple):
    """A turn in time."""

    rank: int
    turn: Turn
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Args:
        seconds: time when the last rank has finished.
        busy: for each rank the time in which it works.
        boxes: all turns in time, if they are recorded.
    """

    seconds: float
    busy: tuple[float, ...]
    boxes: tuple[Box, ...]

    @property
    def idle_share(self) -> float:
        """The largest share of the time in which a rank waits."""
        return 1 - min(self.busy) / self.seconds if self.seconds else 0

    @property
    def bubble(self) -> float:
        """The longest time in which a rank waits."""
        return self.seconds - min(self.busy)


def simulate(order: Turns, times: Times | None = None, *, boxes: bool = False) -> Simulation:
    """Simulate an order; raise ``OrderError`` if its ranks wait for each other forever.

    Args:
        order: any order.
        times: times of one microbatch; by default all three kinds of work take the same time.
        boxes: whether to record when each turn begins and ends.

    Example:
        >>> from tfscale.plan import pipelines
        >>> seen = pipelines.simulate(pipelines.gpipe(4, 8), pipelines.Times(1, 1, 1))
        >>> seen.seconds, seen.bubble
        (33, 9)
    """
    return _Run(order, times or Times(), arguments.flag(boxes, "boxes")).run()


class _Run:
    """The state of one simulation."""

    def __init__(self, order: Turns, times: Times, record: bool) -> None:
        self.order, self.stages, self.record = order, order.stages, record
        self.lasts = times.table(order.stages)
        self.transfer, self.together = times.transfer, times.together
        self.ended: dict[Result, tuple[float, int]] = {}
        self.waiting: dict[Result, int] = {}
        self.next = [0] * order.ranks
        self.free: list[float] = [0] * order.ranks
        self.busy: list[float] = [0] * order.ranks
        self.boxes: list[Box] = []

    def run(self) -> Simulation:
        ready = list(range(self.order.ranks))
        while ready:
            ready += self._advance(ready.pop())
        turns = self.order.turns
        stuck = [rank for rank in range(self.order.ranks) if self.next[rank] < len(turns[rank])]
        if stuck:
            at = ", ".join(f"rank {rank} at {turns[rank][self.next[rank]]}" for rank in stuck)
            raise OrderError(f"{self.order.name} never ends: {at}")
        return Simulation(max(self.free), tuple(self.busy), tuple(self.boxes))

    def _advance(self, rank: int) -> list[int]:
        """Take turns until one has to wait; return the ranks that waited for their results."""
        turns = self.order.turns[rank]
        woken: list[int] = []
        while self.next[rank] < len(turns):
            first = turns[self.next[rank]]
            group = (first, turns[self.next[rank] + 1]) if first.with_next else (first,)
            sources = [needed(turn, self.stages) for turn in group]
            for source in sources:
                if source is not None and source not in self.ended:
                    self.waiting[source] = rank
                    return woken
            self._take(rank, group, [source for source in sources if source is not None])
            self.next[rank] += len(group)
            for turn in group:
                result = made(turn)
                if result is not None:
                    self.ended[result] = self.free[rank], rank
                    if result in self.waiting:
                        woken.append(self.waiting.pop(result))
        return woken

    def _take(self, rank: int, group: Sequence[Turn], sources: Sequence[Result]) -> None:
        start = self.free[rank]
        for source in sources:
            end, maker = self.ended[source]
            start = max(start, end if maker == rank else end + self.transfer)
        lasts = self.lasts[group[0].work][group[0].stage]
        if len(group) > 1:
            both = lasts + self.lasts[group[1].work][group[1].stage]
            lasts = both if self.together is None else self.together
        self.free[rank] = start + lasts
        self.busy[rank] += lasts
        if self.record:
            self.boxes += [Box(rank, turn, start, start + lasts) for turn in group]
