"""Hierarchical: sends much within groups, and little between groups."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from tfscale.collectives.cost import Cluster, Cost, Link, Machine, checked_sizes, fan_in
from tfscale.collectives.moves import Move, add, keep, send
from tfscale.collectives.programs import MOST_RANKS
from tfscale.collectives.ring import ring
from tfscale.collectives.schedule import Schedule
from tfscale.support import arguments


def hierarchical(groups: int | Sequence[int], outer: Callable[[int], Schedule] = ring) -> Schedule:
    """Sum within each group, sum between groups by any algorithm, and share within each group.

    A group is the devices of a host, or the hosts of a rack: consecutive ranks with fast links
    between them. The buffer is cut into m slots, where m is the size of the smallest group. The
    first m ranks of each group are its servers, one for each slot:

    1. every rank sends each slot to its own group's server, which adds the slots;
    2. the servers of a slot, one of each group, run the outer algorithm on it; all slots run at the
       same time, so that every server uses its own link to other groups;
    3. each server sends its slot to every rank of its group.

    Within the group, ranks send directly: groups are small, direct sending takes one round where a
    ring takes m-1, and a value is encoded once. Ranks beyond the first m only send and receive.

    Args:
        groups: sizes of the groups, which may differ; or the number of ranks, for groups near its
            square root.
        outer: the algorithm between groups: any function from a number of ranks to a schedule,
            including another ``hierarchical``.

    Example:
        >>> from tfscale.collectives import halving, hierarchical
        >>> hierarchical([8, 8, 8, 8], outer=halving).ranks
        32

    Cost: the outer algorithm's rounds, and 2 more; a server in groups of g sends 2(g-1)/g of the
        buffer within the group, and 1/g of the outer algorithm's bytes between groups; the time is
        T_outer(N/g) + 2(g-1) (alpha + beta N/g) + gamma N/g. Uneven groups count with the largest
        group's messages and the smallest group's slots: an upper bound of rounds and bytes, an
        estimate of time.

    Reference: Jia et al., "Highly scalable deep learning training system with
    mixed-precision", 2018 (with one server per group); Thakur et al. 2005.
    """
    if hasattr(groups, "__iter__"):
        sizes = checked_sizes(groups, "groups")
    else:
        what = "a list of the groups' sizes, or a number of ranks"
        sizes = _near_square(arguments.whole(groups, "groups", 1, MOST_RANKS, what=what))
    arguments.function(outer, "outer", "a function from a number of ranks to a Schedule")
    starts = [0, *itertools.accumulate(sizes)]
    ranks = starts.pop()
    slots = min(sizes)
    between = outer(len(sizes))
    width = between.chunks  # each slot is cut into the outer algorithm's chunks

    def chunks_of(slot: int) -> range:
        return range(slot * width, (slot + 1) * width)

    def build(rank: int) -> Iterator[Move]:
        group = bisect.bisect_right(starts, rank) - 1
        start, size = starts[group], sizes[group]
        me = rank - start
        others = [(me + turn) % size for turn in range(1, size)]
        for turn in range(slots):
            server = (me + 1 + turn) % slots
            if server != me:
                yield send(start + server, chunks_of(server))
        if me < slots:
            for turn in range(slots):  # in the order in which they arrive
                for giver in range((me - 1 - turn) % slots, size, slots):
                    if giver != me:
                        yield add(start + giver, chunks_of(me))
            for kind, peer, first, last in between.build(group):
                shift = chunks_of(me).start
                yield Move(
                    kind, peer if peer < 0 else starts[peer] + me, first + shift, last + shift
                )
            yield from (send(start + other, chunks_of(me)) for other in others)
        for server in reversed(others):
            if server < slots:
                yield keep(start + server, chunks_of(server))

    name = f"hierarchical({_short(sizes)}, {between.name})"
    return Schedule(name, ranks, slots * width, build, _cost(sizes, between))


def _cost(sizes: Sequence[int], between: Schedule) -> Cost | None:
    outer, slots, largest = between.cost, min(sizes), max(sizes)
    if outer is None:
        return None

    def seconds(nbytes: float, machine: Machine, gamma: float) -> float:
        inner_link, outer_link = _links(machine, sizes)
        slot = nbytes / slots
        message = inner_link.seconds(slot)
        gather = fan_in(largest - 1, message, gamma * slot)
        return gather + outer.time(slot, outer_link, gamma) + (largest - 1) * message

    within = Fraction(slots - 1 + largest - 1, slots)
    return Cost(
        rounds=outer.rounds + 2 * (largest > 1),
        sent=within + outer.sent / slots,
        received=within + outer.received / slots,
        seconds=seconds,
        exact=outer.exact and slots == largest,
    )


def _links(machine: Machine, sizes: Sequence[int]) -> tuple[Link, Link]:
    if isinstance(machine, Link):
        return machine, machine
    if isinstance(machine, Cluster) and machine.sizes == tuple(sizes):
        return machine.inner, machine.outer
    raise ValueError(
        f"a hierarchical schedule over groups of {_short(sizes)} ranks cannot be priced on a "
        f"cluster whose groups are {_short(machine.sizes)}; build it with the cluster's sizes"
    )


def _near_square(ranks: int) -> tuple[int, ...]:
    """Return equal groups if a divisor is near the root, else sizes that differ by one."""
    root = math.isqrt(ranks)
    near = range(root, (root + 1) // 2, -1)
    count = next((groups for groups in near if ranks % groups == 0), root)
    size, larger = divmod(ranks, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def _short(sizes: Sequence[int]) -> str:
    """Return a short text that identifies groups: [8, 8, 3] -> '2x8+3'."""
    runs = [(size, len(list(run))) for size, run in itertools.groupby(sizes)]
    return "+".join(f"{count}x{size}" if count > 1 else f"{size}" for size, count in runs)
