"""Double binary tree: the number of rounds grows only with the logarithm of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

from tfscale.collectives.cost import Cost, Link, flat
from tfscale.collectives.moves import Move, add, finalise, keep, send
from tfscale.collectives.programs import checked_ranks
from tfscale.collectives.schedule import Schedule


def tree(ranks: int) -> Schedule:
    """Send half of the buffer up and down one tree, and the other half another tree.

    In a binary tree half of the ranks are leaves: they send once and receive once, and idle. So
    there are two trees over the same ranks, with a chunk each. In the second tree the ranks are
    mirrored (P even) or shifted by one (P odd), so that no rank is an inner node of both. In each
    tree the partial sums climb to the root, which owns the chunk, and the final bytes descend.

    Cost: 2 floor(log2 P) rounds; each rank sends at most 2 buffers; without parts, the time is
    about log2 P (4 (alpha + beta N/2) + gamma N/2). The engine's parts follow each other through
    the trees; with many parts the time falls to about 2.5 beta N, whatever the number of ranks.

    Args:
        ranks: how many ranks take part.

    Example:
        >>> from tfscale.collectives import tree
        >>> tree(1024).cost.rounds
        20

    Reference: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth
    broadcast, reduction and scan", Parallel Computing 2009.
    """
    ranks = checked_ranks(ranks)

    def place_in_second(rank: int) -> int:
        return ranks - 1 - rank if ranks % 2 == 0 else (rank + 1) % ranks

    def rank_in_second(place: int) -> int:
        return ranks - 1 - place if ranks % 2 == 0 else (place - 1) % ranks

    def nodes(rank: int) -> list[Node]:
        second = node_at(place_in_second(rank), ranks)
        return [node_at(rank, ranks), second.renamed(rank_in_second)]

    def build(rank: int) -> Iterator[Move]:
        for chunk, node in enumerate(nodes(rank)):
            for child in reversed(node.children):  # the smaller subtree is ready first
                yield add(child, chunk)
            yield finalise(chunk) if node.parent is None else send(node.parent, chunk)
        for chunk, node in enumerate(nodes(rank)):
            if node.parent is not None:
                yield keep(node.parent, chunk)
            for child in node.children:
                yield send(child, chunk)

    def seconds(nbytes: float, link: Link, gamma: float) -> float:
        message, addition = link.seconds(nbytes / 2), gamma * nbytes / 2
        return climb(ranks, message, addition) + descend(ranks, message)

    # Three messages as an inner node of one tree, one as a leaf of the other, half
    # a buffer each; with up to three ranks the only inner nodes are the roots.
    volume = Fraction(min(ranks, 4), 2) if ranks > 1 else Fraction(0)
    cost = Cost(2 * depth(ranks), volume, volume, flat(seconds))
    return Schedule("tree", ranks, 2, build, cost)


class Node(NamedTuple):
    """A rank's place in a tree; children come larger subtree first."""

    parent: int | None
    children: tuple[int, ...]

    def renamed(self, name: Callable[[int], int]) -> Node:
        """Return this node with ``name(place)`` instead of each place."""
        parent = None if self.parent is None else name(self.parent)
        return Node(parent, tuple(name(child) for child in self.children))


def node_at(place: int, size: int) -> Node:
    """Return the neighbours of a place in the tree over the places 0 .. size-1.

    Count the places from one: odd places are leaves, and a place divisible by 2^k but not by
    2^(k+1) is k levels above them. So the tree is in order (all places left of a node are in its
    left subtree), left subtrees are perfect, and the root is the largest power of two. Places
    beyond the size are skipped.
    """
    here = place + 1
    level = here & -here
    children = []
    if level > 1:
        children.append(here - level // 2 - 1)
    right = min(level - 1, size - here)  # the size of the right subtree
    if right > 0:
        children.append(here + _power_up_to(right) - 1)
    if here == _power_up_to(size):
        return Node(None, tuple(children))
    parent = here
    while parent == here or parent > size:
        parent = (parent - level) | (2 * level)
        level *= 2
    return Node(parent - 1, tuple(children))


def depth(size: int) -> int:
    """Return the largest number of edges between the root and a leaf."""
    return max(size, 1).bit_length() - 1


def climb(size: int, message: float, addition: float) -> float:
    """Return the seconds until the root has the sum, if only this tree uses the ports."""
    if size <= 1:
        return 0
    level = max(2 * message, message + addition) + addition  # two children, ready together
    left = (depth(size) - 1) * level
    right_size = size - _power_up_to(size)
    if right_size == 0:
        return left + message + addition
    first = climb(right_size, message, addition) + message
    second = max(left, first) + message
    return max(second, first + addition) + addition


def descend(size: int, message: float) -> float:
    """Return the seconds until the last leaf has the root's bytes; larger subtrees come first."""
    if size <= 1:
        return 0
    left = message + (depth(size) - 1) * 2 * message
    right_size = size - _power_up_to(size)
    return max(left, 2 * message + descend(right_size, message)) if right_size else left


def _power_up_to(number: int) -> int:
    return 1 << (number.bit_length() - 1)
