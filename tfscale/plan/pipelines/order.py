"""Orders of pipelines: turns of all ranks, and what can be done with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from tfscale.plan.pipelines.draw import draw
from tfscale.plan.pipelines.simulate import Times
from tfscale.plan.pipelines.turns import Turn, Turns, Work, made, needed
from tfscale.plan.pipelines.verify import Count, verify
from tfscale.support import arguments

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Transfer(NamedTuple):
    """A message between two ranks: the output of a turn that another rank needs."""

    sends: bool
    peer: int
    turn: Turn

    def __str__(self) -> str:
        verb, preposition = ("send", "to") if self.sends else ("receive", "from")
        return f"{verb} {self.turn} {preposition} rank {self.peer}"


@dataclasses.dataclass(frozen=True)
class PipelineOrder(Turns):
    """The turns of all ranks of a pipeline.

    Args:
        name: name of the order.
        stages: number of stages of the model.
        microbatches: number of microbatches of a batch.
        turns: for each rank its turns, in order.

    Example:
        >>> from tfscale.plan import pipelines
        >>> order = pipelines.one_f_one_b(stages=2, microbatches=3)
        >>> print(*order.turns[0], sep=", ")
        F0 of stage 0, F1 of stage 0, B0 of stage 0, F2 of stage 0, B1 of stage 0, B2 of stage 0
        >>> order.verify().live
        (2, 1)
    """

    def program(self, rank: int) -> Iterator[Turn | Transfer]:
        """Yield everything that a rank does: its turns, what it receives before, sends after."""
        arguments.whole(rank, "rank", 0, self.ranks - 1, what="a rank of this pipeline")
        owners = self.owners()
        for turn in self.turns[rank]:
            source = needed(turn, self.stages)
            if source is not None and (peer := owners[source[1:]]) != rank:
                yield Transfer(False, peer, Turn(turn.work, *source[1:]))
            yield turn
            to = turn.stage + (1 if turn.work is Work.FORWARD else -1)
            if made(turn) and 0 <= to < self.stages and owners[turn.microbatch, to] != rank:
                yield Transfer(True, owners[turn.microbatch, to], turn)

    def verify(self) -> Count:
        """Prove that the order trains, and count what it holds; raise ``OrderError`` if not."""
        return verify(self)

    def draw(self, times: Times | None = None) -> Figure:
        """Plot the order: time to the right, one line per rank, one box per turn."""
        return draw(self, times)
