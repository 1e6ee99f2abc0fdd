"""Routes: each message goes from one rank to another, and nothing is added."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from tfscale.collectives.cost import Cost, Link, flat
from tfscale.collectives.moves import Kind, Move, finalise, keep, send
from tfscale.collectives.programs import checked_ranks
from tfscale.collectives.schedule import Schedule
from tfscale.support import arguments


def transfer(ranks: int, source: int, target: int) -> Schedule:
    """Send the buffer of one rank to one other; all other ranks do nothing.

    Cost: 1 round, and alpha + beta N seconds.

    Args:
        ranks: how many ranks there are.
        source: the rank that sends.
        target: the rank that receives.

    Example:
        >>> from tfscale.collectives import transfer
        >>> [str(move) for move in transfer(3, 0, 2).program(2)]
        ['keep 0 from rank 0']
    """
    ranks = checked_ranks(ranks)
    what = f"one of the {ranks} ranks"
    source = arguments.whole(source, "source", 0, ranks - 1, what=what)
    target = arguments.whole(target, "target", 0, ranks - 1, what=what)
    if source == target:
        expected = f"another rank than the source, {source}"
        raise arguments.wrong(target, "target", expected, "A rank has its own numbers already")

    def build(rank: int) -> Iterator[Move]:
        if rank == source:
            yield finalise(0)
            yield send(target, 0)
        if rank == target:
            yield keep(source, 0)

    def seconds(nbytes: float, link: Link, gamma: float) -> float:
        return link.seconds(nbytes)

    return Schedule(
        f"transfer({source}, {target})",
        ranks,
        1,
        build,
        Cost(1, Fraction(1), Fraction(1), flat(seconds)),
        goal="route",
        route=lambda chunk: (source, target),
    )


def all_to_all(ranks: int) -> Schedule:
    """Give each rank a message of its own from each rank, directly.

    Chunk s P + k is the message from rank s to the rank k places further, and so each rank begins
    with another target: no port is asked twice at a time.

    Cost, with N the bytes that all ranks bring together: 1 round, and
    (P - 1) (alpha + beta N / P^2) seconds; a rank sends N (P - 1) / P^2 bytes.

    Args:
        ranks: how many ranks take part.

    Example:
        >>> from tfscale.collectives import all_to_all
        >>> all_to_all(4).verify().messages
        12

    Reference: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
    in MPICH", IJHPCA 2005 (the pairwise exchange).
    """
    ranks = checked_ranks(ranks)

    def build(rank: int) -> Iterator[Move]:
        own = rank * ranks
        yield finalise(range(own, own + ranks))
        for step in range(1, ranks):
            yield send((rank + step) % ranks, own + step)
        for step in range(1, ranks):
            source = (rank - step) % ranks
            yield keep(source, source * ranks + step)

    def seconds(nbytes: float, link: Link, gamma: float) -> float:
        return (ranks - 1) * link.seconds(nbytes / ranks**2)

    def route(chunk: int) -> tuple[int, int]:
        source, step = divmod(chunk, ranks)
        return source, (source + step) % ranks

    share = Fraction(ranks - 1, ranks**2)
    cost = Cost(min(1, ranks - 1), share, share, flat(seconds))
    return Schedule(
        "all_to_all",
        ranks,
        ranks**2,
        build,
        cost,
        goal="route",
        symmetric=True,
        route=route,
    )


def places(schedule: Schedule, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the chunks of a route that this rank brings, and those that it gets, in their order.

    What a rank brings is ordered by target, and what it gets by source.

    Example:
        >>> from tfscale.collectives import all_to_all
        >>> places(all_to_all(2), 1)  # its messages to 0 and 1, and those from 0 and 1
        ((3, 2), (1, 2))
    """
    assert schedule.route is not None, "a schedule of the goal route says what goes where"
    brings, gets = [], []
    for move in schedule.program(rank):
        for chunk in range(move.first, move.last):
            source, target = schedule.route(chunk)
            if source == rank and move.kind is Kind.FINALISE:
                brings.append((target, chunk))
            if target == rank and move.kind in (Kind.FINALISE, Kind.KEEP):
                gets.append((source, chunk))
    return tuple(c for _, c in sorted(brings)), tuple(c for _, c in sorted(gets))
