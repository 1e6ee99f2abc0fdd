"""The programs of all ranks: a collective algorithm as data."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable
from typing import get_args

from tfscale.collectives.cost import Cost
from tfscale.collectives.moves import Goal, Move, Program, ScheduleError
from tfscale.support import arguments

A_SCHEDULE = "a Schedule of tfscale.collectives, such as ring(4)"  # for messages

# A ring of a thousand ranks has programs of 4,000 moves.
MOST_MOVES = 1_000_000
LONGEST_NAME = 200
MOST_RANKS = (1 << 31) - 1  # C++ counts them in an int


def checked_ranks(ranks: int) -> int:
    """Return a number of ranks, or raise."""
    return arguments.whole(ranks, "ranks", 1, MOST_RANKS, what="a number of ranks")


def _check_name(name: object) -> None:
    if isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and name.isprintable():
        return
    expected = f"1 to {LONGEST_NAME} printable characters, which ranks compare and messages show"
    raise arguments.wrong(name, "name", expected)


@dataclasses.dataclass(frozen=True)
class Programs:
    """Moves of every rank, made on demand; ``Schedule`` explains the arguments."""

    name: str
    ranks: int
    chunks: int
    build: Callable[[int], Iterable[Move]]
    cost: Cost | None = None
    goal: Goal = "all_reduce"
    symmetric: bool = False
    route: Callable[[int], tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        checked_ranks(self.ranks)
        arguments.whole(self.chunks, "chunks", 1, what="a number of chunks")
        arguments.function(self.build, "build", "a function from a rank to its moves")
        arguments.choice(self.goal, "goal", get_args(Goal))
        arguments.flag(self.symmetric, "symmetric")
        if self.goal == "route":
            what = "a function from a chunk to its source and target"
            arguments.function(self.route, "route", what)
        elif self.route is not None:
            raise arguments.wrong(self.route, "route", f"None, as the goal is {self.goal}")
        if self.cost is not None:
            arguments.instance(self.cost, "cost", Cost, "a Cost, or None if it is not known")

    def program(self, rank: int) -> Program:
        """Return the moves of one rank, without looking at any other."""
        what = f"one of the {self.ranks} ranks of {self.name}"
        rank = arguments.whole(rank, "rank", 0, self.ranks - 1, what=what)
        moves = tuple(itertools.islice(self.build(rank), MOST_MOVES + 1))
        if len(moves) > MOST_MOVES:
            raise ScheduleError(
                f"{self.name}: the program of rank {rank} has more than {MOST_MOVES:,} moves; "
                "expected a few for each chunk. Is there an endless loop in its build?"
            )
        for index, move in enumerate(moves):
            if not isinstance(move, Move):
                raise ScheduleError(
                    f"{self.name}: rank {rank}, move {index}: expected what send, add, finalise "
                    f"or keep return, got {move!r:.60}"
                )
        return moves

    def fingerprint(self) -> str:
        """Return a short string; ranks whose strings differ must not reduce together.

        Up to 64 ranks the string covers every move of every rank; beyond, only the name, the number
        of ranks and the number of chunks.
        """
        text = f"{self.name}/{self.ranks}/{self.chunks}"
        if self.ranks > 64:
            return text
        digest = hashlib.sha256()
        for rank in range(self.ranks):
            flat = [int(number) for move in self.program(rank) for number in move]
            digest.update(f"{rank}:{flat};".encode())
        return f"{text}/{digest.hexdigest()[:16]}"
