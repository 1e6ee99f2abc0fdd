"""Halving and doubling: few messages, and the smallest number of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from tfscale.collectives.cost import Cost, Link, flat
from tfscale.collectives.moves import Move, add, finalise, keep, send
from tfscale.collectives.programs import checked_ranks
from tfscale.collectives.schedule import Schedule


def halving(ranks: int) -> Schedule:
    """Use Rabenseifner's algorithm: exchange half, then a quarter, then an eighth.

    The core is the largest power of two of ranks, C = 2^k, with as many chunks. In the first round
    each rank and the rank C/2 away split the buffer: each sends the other's half, in one message,
    and adds the received half to its own. The second round splits that half with the rank C/4 away,
    and so on, until after k rounds rank c owns chunk c. The same path backwards shares the chunks:
    each round doubles the chunks that a rank holds.

    If P is not a power of two, the P-C ranks beyond the core first send their whole buffer to a
    partner in the core, and receive the result from it at the end.

    Cost: 2 log2 C rounds, and 2 more if P > C; each rank sends 2(C-1)/C of the buffer, and a
    partner of an extra rank one buffer more; the time is 2 log2 C alpha + (2 beta + gamma) N
    (C-1)/C, and if P > C another 2 (alpha + beta N) + gamma N.

    Args:
        ranks: how many ranks take part.

    Example:
        >>> from tfscale.collectives import halving
        >>> [halving(ranks).verify().rounds for ranks in (4, 5, 8)]
        [4, 6, 6]

    Reference: Thakur, Rabenseifner and Gropp, "Optimization of collective
    communication operations in MPICH", IJHPCA 2005.
    """
    ranks = checked_ranks(ranks)
    levels = max(ranks, 1).bit_length() - 1
    core = 1 << levels
    everything = range(core)

    def build(rank: int) -> Iterator[Move]:
        if rank >= core:
            yield send(rank - core, everything)
            yield keep(rank - core, everything)
            return
        extra = rank + core if rank + core < ranks else None
        if extra is not None:
            yield add(extra, everything)
        splits = [_split(rank, core >> level) for level in range(levels)]
        for peer, mine, theirs in splits:
            yield send(peer, theirs)
            yield add(peer, mine)
        yield finalise(rank)
        for peer, mine, theirs in reversed(splits):
            yield send(peer, mine)
            yield keep(peer, theirs)
        if extra is not None:
            yield send(extra, everything)

    folded = ranks > core

    def seconds(nbytes: float, link: Link, gamma: float) -> float:
        halves = nbytes - nbytes / core  # N/2 + N/4 + ... + N/C
        core_time = 2 * (levels * link.alpha + link.beta * halves) + gamma * halves
        return core_time + folded * (2 * link.seconds(nbytes) + gamma * nbytes)

    volume = Fraction(2 * (core - 1), core) + folded
    cost = Cost(2 * levels + 2 * folded, volume, volume, flat(seconds))
    return Schedule("halving", ranks, core, build, cost)


def _split(rank: int, width: int) -> tuple[int, range, range]:
    """Cut a rank's block of ``width`` chunks in two: return the peer, own half, peer's half."""
    half, start = width // 2, rank - rank % width
    lower, upper = range(start, start + half), range(start + half, start + width)
    mine, theirs = (lower, upper) if rank < start + half else (upper, lower)
    return rank ^ half, mine, theirs
