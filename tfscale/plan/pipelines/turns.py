"""The order of a pipeline's work as data: for each rank, which turns it takes, one after another.

A model is cut into ``stages``, a batch into ``microbatches``. A turn is one piece of work of one
microbatch in one stage. Which rank works on a stage follows from the turns, and so do all messages:
a rank that needs what another rank has made receives it, just before the turn that needs it.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

from tfscale.support import arguments


class OrderError(ValueError):
    """An order of turns that cannot train: it misses work, repeats work, or never ends."""


class Work(enum.Enum):
    """A kind of work on one microbatch in one stage."""

    FORWARD = "F"
    BACKWARD = "B"  # both halves of the backward pass at once
    BACKWARD_INPUT = "I"  # the gradient of the stage's input
    BACKWARD_WEIGHT = "W"  # the gradient of the stage's weights


class Turn(NamedTuple):
    """One piece of work of a rank.

    Attributes:
        work: kind of work.
        microbatch: number of the microbatch.
        stage: number of the stage in the model.
        with_next: whether this turn and the next one run at the same time (DualPipe).
    """

    work: Work
    microbatch: int
    stage: int
    with_next: bool = False

    def __str__(self) -> str:
        return f"{self.work.value}{self.microbatch} of stage {self.stage}"


@dataclasses.dataclass(frozen=True)
class Turns:
    """The turns of all ranks of a pipeline, as data without methods that judge them.

    Args:
        name: name of the order.
        stages: number of stages of the model.
        microbatches: number of microbatches of a batch.
        turns: for each rank its turns, in order.
    """

    name: str
    stages: int
    microbatches: int
    turns: tuple[tuple[Turn, ...], ...]

    def __post_init__(self) -> None:
        arguments.text(self.name, "name")
        arguments.whole(self.stages, "stages", 1)
        arguments.whole(self.microbatches, "microbatches", 1)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.turns)

    def owners(self) -> dict[tuple[int, int], int]:
        """Return for each microbatch and stage the rank that makes its forward pass."""
        return {
            (turn.microbatch, turn.stage): rank
            for rank, turns in enumerate(self.turns)
            for turn in turns
            if turn.work is Work.FORWARD
        }


Result = tuple[bool, int, int]  # whether of a forward pass, the microbatch, the stage


def needed(turn: Turn, stages: int) -> Result | None:
    """Return the result of another stage that a turn needs, or None."""
    work, microbatch, stage, _ = turn
    if work is Work.FORWARD:
        return (True, microbatch, stage - 1) if stage else None
    if work is not Work.BACKWARD_WEIGHT and stage < stages - 1:
        return False, microbatch, stage + 1
    return None


def made(turn: Turn) -> Result | None:
    """Return the result of a turn that other stages need, or None."""
    work, microbatch, stage, _ = turn
    return None if work is Work.BACKWARD_WEIGHT else (work is Work.FORWARD, microbatch, stage)
