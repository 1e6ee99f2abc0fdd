"""Ring: all links are always busy, and nothing is sent twice."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from tfscale.collectives.cost import Cost, Link, flat
from tfscale.collectives.moves import Move, add, finalise, keep, send
from tfscale.collectives.programs import checked_ranks
from tfscale.collectives.schedule import Schedule


def ring(ranks: int) -> Schedule:
    """Send each chunk around the ring twice: once to sum it, once to share it.

    The buffer is cut into P chunks, and chunk c belongs to rank c. Its partial sum starts at rank
    c+1 and goes around, each rank adding its own part, until it reaches its owner. The owner's
    final bytes then go around in the same direction. All P chunks move at the same time, each one
    rank behind the other, so every rank sends and receives in every round.

    Cost: 2(P-1) rounds; each rank sends 2(P-1)/P of the buffer; the time is 2(P-1) (alpha + beta
    N/P) + (P-1) gamma N/P.

    Args:
        ranks: how many ranks take part.

    Example:
        >>> from tfscale.collectives import ring
        >>> ring(4).verify().rounds
        6

    Reference: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations", JPDC 2009.
    """
    ranks = checked_ranks(ranks)

    def build(rank: int) -> Iterator[Move]:
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        # distance that the chunk has travelled when it reaches this rank
        for place in range(ranks):
            chunk = (rank - 1 - place) % ranks
            if place > 0:
                yield add(before, chunk)
            if place < ranks - 1:
                yield send(after, chunk)
            else:
                yield finalise(chunk)
        for place in range(ranks):
            chunk = (rank - place) % ranks
            if place > 0:
                yield keep(before, chunk)
            if place < ranks - 1:
                yield send(after, chunk)

    def seconds(nbytes: float, link: Link, gamma: float) -> float:
        chunk = nbytes / ranks
        return (ranks - 1) * (2 * link.seconds(chunk) + gamma * chunk)

    volume = Fraction(2 * (ranks - 1), ranks) if ranks > 0 else Fraction(0)
    cost = Cost(2 * (ranks - 1), volume, volume, flat(seconds))
    return Schedule("ring", ranks, ranks, build, cost, symmetric=True)
