"""Schedules: programs of all ranks that can be verified and drawn."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tfscale.collectives.draw import draw
from tfscale.collectives.programs import A_SCHEDULE, Programs
from tfscale.collectives.verify import Count, verify
from tfscale.support import arguments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tfscale.collectives.cost import Cluster, Link


@dataclasses.dataclass(frozen=True)
class Schedule(Programs):
    """The moves of every rank, made on demand: ``program(rank)`` builds one rank's moves.

    Args:
        name: algorithm and parameters, in at most 200 printable characters. An all-reduce between
            ranks that run schedules of different names raises an error.
        ranks: how many ranks take part.
        chunks: number of chunks that the buffer is cut into.
        build: a pure function from a rank to its moves.
        cost: the closed form of the cost, if it is known (see ``cost.py``).
        goal: the state at the end; ``verify`` proves it.
        symmetric: whether rank r's program is that of rank 0, with r added to every peer (modulo
            ranks), and r * chunks/ranks to every chunk (modulo chunks). Then simulating one rank
            suffices. ``verify`` checks the claim.
        route: a function from a chunk to its source and its target; only for the goal ``route``.
    """

    def verify(self) -> Count:
        """Prove the schedule right, or raise ``ScheduleError`` saying what is wrong.

        Returns:
            The rounds, bytes and messages that were counted on the way.

        Example:
            >>> from tfscale.collectives import ring
            >>> ring(4).verify().rounds
            6
        """
        return verify(self)

    def draw(self, link: Link | Cluster | None = None, nbytes: float = 1.0) -> Figure:
        """Plot a space-time diagram: time to the right, one line per rank (see ``draw.py``)."""
        return draw(self, link, nbytes)


def checked_schedule(schedule: Schedule, name: str = "schedule") -> Schedule:
    """Return a schedule, or raise."""
    return arguments.instance(schedule, name, Schedule, A_SCHEDULE)
