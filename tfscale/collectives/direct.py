"""Direct: every rank sends to every other rank, once to sum and once to share."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from tfscale.collectives.cost import Cost, Link, fan_in, flat
from tfscale.collectives.moves import Move, add, finalise, keep, send
from tfscale.collectives.programs import checked_ranks
from tfscale.collectives.schedule import Schedule


def direct(ranks: int) -> Schedule:
    """Use a parameter server in which every rank serves one chunk.

    Rank c owns chunk c. Every rank sends its part of chunk c directly to rank c, which adds the
    parts and sends the result directly back. A value is encoded only twice (by the sender and by
    the owner), so this schedule has the smallest error on a narrow wire.

    Rank r sends to r+1 first, then to r+2, and so on: at any moment all ranks send to different
    peers, so no message waits for another one at its receiver.

    Cost: 2 rounds; each rank sends 2(P-1)/P of the buffer, in 2(P-1) messages; the time is 2(P-1)
    (alpha + beta N/P) + gamma N/P, if adding is faster than receiving.

    Args:
        ranks: how many ranks take part.

    Example:
        >>> from tfscale.collectives import direct
        >>> direct(100).verify().rounds
        2

    Reference: Li et al., "Scaling distributed machine learning with the
    parameter server", OSDI 2014 (servers and workers on the same machines).
    """
    ranks = checked_ranks(ranks)

    def build(rank: int) -> Iterator[Move]:
        after = [(rank + turn) % ranks for turn in range(1, ranks)]
        before = [(rank - turn) % ranks for turn in range(1, ranks)]
        yield from (send(owner, owner) for owner in after)
        yield from (add(giver, rank) for giver in before)
        yield finalise(rank)
        yield from (send(peer, rank) for peer in after)
        yield from (keep(owner, owner) for owner in before)

    def seconds(nbytes: float, link: Link, gamma: float) -> float:
        chunk = nbytes / ranks
        message = link.seconds(chunk)
        return fan_in(ranks - 1, message, gamma * chunk) + (ranks - 1) * message

    volume = Fraction(2 * (ranks - 1), ranks) if ranks > 0 else Fraction(0)
    cost = Cost(2 * (ranks > 1), volume, volume, flat(seconds))
    return Schedule("direct", ranks, ranks, build, cost, symmetric=True)
