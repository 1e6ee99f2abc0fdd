"""Schedules: collective algorithms as data.

The buffer is cut into ``chunks``. A schedule says, for each rank, which moves to make on which
chunks. There are four kinds of move:

``send``
    Send the rank's value of these chunks to the peer: its partial sum before the chunk is final,
    the owner's bytes (never encoded again) afterwards.
``add``
    Receive the peer's partial sum and add it to this rank's.
``finalise``
    Declare this rank's partial sum complete: the rank owns the chunk and encodes it once.
``keep``
    Receive the owner's bytes and keep the decoded values.

Moves that touch a common chunk run in the order of the program; all others are
free to overlap.

A message is identified by its sender, its receiver, its range of chunks and whether it carries a
partial sum or final bytes. So ``send`` and the move that receives it name the same range. In one
schedule no two messages are equal.

In a *mixture* each rank may send its own value to several others, before it adds their values.
After all additions it finalises its own result.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from tfscale.support import arguments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tfscale.collectives.cost import Cluster, Cost, Link
    from tfscale.collectives.verify import Count

Goal = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "mixture"]


class ScheduleError(ValueError):
    """Raised if a schedule does not do what it promises; the message says where."""


class Kind(enum.IntEnum):
    """The kind of a move; ``custom_ops/engine/program.h`` uses the same numbers."""

    SEND = 0
    ADD = 1
    FINALISE = 2
    KEEP = 3


class Move(NamedTuple):
    """One move of one rank's program, on the chunks ``first <= chunk < last``."""

    kind: Kind
    peer: int
    first: int
    last: int

    def __str__(self) -> str:
        span = f"{self.first}" if self.last == self.first + 1 else f"{self.first}..{self.last - 1}"
        peer = {Kind.SEND: f" to rank {self.peer}", Kind.FINALISE: ""}
        return f"{self.kind.name.lower()} {span}{peer.get(self.kind, f' from rank {self.peer}')}"


def _move(kind: Kind, peer: int, chunks: int | range) -> Move:
    return Move(kind, arguments.whole(peer, "peer", 0, what="a rank"), *_span(chunks))


def _span(chunks: int | range) -> tuple[int, int]:
    if not isinstance(chunks, range):
        what = "a range of chunks, or the number of one"
        first = arguments.whole(chunks, "chunks", 0, what=what)
        return first, first + 1
    if chunks.step != 1 or not len(chunks):
        expected = "a range of consecutive chunks"
        raise arguments.wrong(chunks, "chunks", expected, "Use one move per run")
    return chunks.start, chunks.stop


def send(peer: int, chunks: int | range) -> Move:
    """Send this rank's value of ``chunks`` to ``peer``.

    Args:
        peer: the rank that receives the value.
        chunks: the number of one chunk, or a range of them.

    Example:
        >>> move = send(1, range(2))  # the chunks 0 and 1, to rank 1
    """
    return _move(Kind.SEND, peer, chunks)


def add(peer: int, chunks: int | range) -> Move:
    """Receive the partial sum of ``peer`` and add it to this rank's.

    Args:
        peer: the rank that sends the partial sum.
        chunks: the number of one chunk, or a range of them.

    Example:
        >>> move = add(1, 0)
    """
    return _move(Kind.ADD, peer, chunks)


def finalise(chunks: int | range) -> Move:
    """Declare this rank's sum of ``chunks`` complete: it owns them, and encodes them once.

    Args:
        chunks: the number of one chunk, or a range of them.

    Example:
        >>> move = finalise(0)
    """
    return Move(Kind.FINALISE, -1, *_span(chunks))


def keep(peer: int, chunks: int | range) -> Move:
    """Receive the final bytes of ``chunks`` from ``peer``.

    Args:
        peer: the owner of the chunks, or a rank that forwards them.
        chunks: the number of one chunk, or a range of them.

    Example:
        >>> move = keep(1, 1)
    """
    return _move(Kind.KEEP, peer, chunks)


Program = Sequence[Move]

# A ring of a thousand ranks has programs of 4,000 moves.
MOST_MOVES = 1_000_000
LONGEST_NAME = 200


MOST_RANKS = (1 << 31) - 1  # C++ counts them in an int


def checked_ranks(ranks: int) -> int:
    """Return a number of ranks, or raise."""
    return arguments.whole(ranks, "ranks", 1, MOST_RANKS, what="a number of ranks")


def checked_schedule(schedule: Schedule, name: str = "schedule") -> Schedule:
    """Return a schedule, or raise."""
    expected = "a Schedule of tfscale.collectives, such as ring(4)"
    return arguments.instance(schedule, name, Schedule, expected)


def _check_name(name: object) -> None:
    if isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and name.isprintable():
        return
    expected = f"1 to {LONGEST_NAME} printable characters, which ranks compare and messages show"
    raise arguments.wrong(name, "name", expected)


@dataclasses.dataclass(frozen=True)
class Schedule:
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
    """

    name: str
    ranks: int
    chunks: int
    build: Callable[[int], Iterable[Move]]
    cost: Cost | None = None
    goal: Goal = "all_reduce"
    symmetric: bool = False

    def __post_init__(self) -> None:
        _check_name(self.name)
        checked_ranks(self.ranks)
        arguments.whole(self.chunks, "chunks", 1, what="a number of chunks")
        arguments.function(self.build, "build", "a function from a rank to its moves")
        arguments.choice(self.goal, "goal", get_args(Goal))
        arguments.flag(self.symmetric, "symmetric")
        if self.cost is not None:
            from tfscale.collectives.cost import Cost

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

    def verify(self) -> Count:
        """Prove the schedule right, or raise ``ScheduleError`` saying what is wrong.

        Returns:
            The rounds, bytes and messages that were counted on the way.

        Example:
            >>> from tfscale.collectives import ring
            >>> ring(4).verify().rounds
            6
        """
        from tfscale.collectives.verify import verify

        return verify(self)

    def draw(self, link: Link | Cluster | None = None, nbytes: float = 1.0) -> Figure:
        """Plot a space-time diagram: time to the right, one line per rank (see ``draw.py``)."""
        from tfscale.collectives.draw import draw

        return draw(self, link, nbytes)

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
