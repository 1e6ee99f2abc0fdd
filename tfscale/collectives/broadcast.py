"""Broadcast: all ranks receive the buffer of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from tfscale.collectives.cost import Cost, Link, flat
from tfscale.collectives.moves import Move, finalise, keep, send
from tfscale.collectives.programs import checked_ranks
from tfscale.collectives.schedule import Schedule
from tfscale.collectives.tree import Node, depth, descend, node_at
from tfscale.support import arguments


def broadcast(ranks: int, root: int = 0) -> Schedule:
    """Send the root's buffer down a binary tree; nothing is added.

    A binomial tree would have fewer rounds. But in a binary tree no rank sends more than two
    buffers. So, with the engine's parts following each other, a large buffer (a model's first
    weights) takes about 2 beta N for any number of ranks.

    Cost: floor(log2 P) rounds; a rank sends at most 2 buffers and receives one; without parts, the
    time is about 2 log2 P (alpha + beta N).

    Args:
        ranks: how many ranks take part.
        root: the rank whose buffer all ranks receive.

    Example:
        >>> from tfscale.collectives import broadcast
        >>> broadcast(8, root=3).verify().rounds
        3

    Reference: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth
    broadcast, reduction and scan", Parallel Computing 2009 (one of the two trees).
    """
    ranks = checked_ranks(ranks)
    root = arguments.whole(root, "root", 0, ranks - 1, what=f"one of the {ranks} ranks")
    top = (1 << depth(ranks)) - 1  # the place of the tree's root

    def neighbours(rank: int) -> Node:
        node = node_at((rank - root + top) % ranks, ranks)
        return node.renamed(lambda place: (place - top + root) % ranks)

    def build(rank: int) -> Iterator[Move]:
        parent, children = neighbours(rank)
        yield finalise(0) if parent is None else keep(parent, 0)
        yield from (send(child, 0) for child in children)

    def seconds(nbytes: float, link: Link, gamma: float) -> float:
        return descend(ranks, link.seconds(nbytes))

    cost = Cost(depth(ranks), Fraction(min(ranks - 1, 2)), Fraction(int(ranks > 1)), flat(seconds))
    return Schedule(f"broadcast(root={root})", ranks, 1, build, cost, goal="broadcast")
