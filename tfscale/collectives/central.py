"""Central: one rank does all the work. Kept for comparison with the other algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from tfscale.collectives.cost import Cost, Link, fan_in, flat
from tfscale.collectives.moves import Move, add, finalise, keep, send
from tfscale.collectives.programs import checked_ranks
from tfscale.collectives.schedule import Schedule


def central(ranks: int) -> Schedule:
    """Use one parameter server: rank 0 receives everything and sends everything back.

    There are few rounds, but they all go through one port: rank 0 receives P-1 buffers and sends
    P-1 buffers, while all others wait.

    Cost: 2 rounds; rank 0 sends (P-1) times the buffer, the others once; the time is 2(P-1) (alpha
    + beta N) + gamma N, if adding is faster than receiving.

    Args:
        ranks: how many ranks take part.

    Example:
        >>> from tfscale.collectives import central
        >>> print(central(8).cost.sent)  # buffers, by rank 0
        7

    Reference: the baseline of Li et al., "Scaling distributed machine learning
    with the parameter server", OSDI 2014.
    """
    ranks = checked_ranks(ranks)

    def build(rank: int) -> Iterator[Move]:
        if rank > 0:
            yield send(0, 0)
            yield keep(0, 0)
            return
        yield from (add(peer, 0) for peer in range(1, ranks))
        yield finalise(0)
        yield from (send(peer, 0) for peer in range(1, ranks))

    def seconds(nbytes: float, link: Link, gamma: float) -> float:
        message = link.seconds(nbytes)
        return fan_in(ranks - 1, message, gamma * nbytes) + (ranks - 1) * message

    volume = Fraction(ranks - 1)
    cost = Cost(2 * (ranks > 1), volume, volume, flat(seconds))
    return Schedule("central", ranks, 1, build, cost)
