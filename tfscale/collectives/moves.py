"""Moves: what a rank does in a collective, as data.

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

In a *route* nothing is added: each chunk has one source, which finalises and sends it, and one
target, which keeps it. A rank need not have every chunk.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tfscale.support import arguments

Goal = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "mixture", "route"]


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
