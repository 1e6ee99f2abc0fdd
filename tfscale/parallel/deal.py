"""The choice of who updates which weight, or which part of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfscale.parallel.layout import Copy, Flat, Layout, Owned, SharedOut

# Weights of fewer numbers stay copies with shard="all": a message costs more than they do.
SMALL = 1024


def dealt(shapes: Sequence[tuple[int, ...]], ranks: int, is_elementwise: bool) -> list[Layout]:
    """Return the layouts of an optimizer's state.

    Args:
        shapes: shapes of the weights.
        ranks: number of ranks.
        is_elementwise: whether the optimizer updates each number by itself.
    """
    return in_parts(shapes, ranks) if is_elementwise else whole(shapes, ranks)


def in_parts(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[Layout]:
    """Return layouts in which each rank holds 1 / P of each array.

    Example:
        >>> [layout.held(0) for layout in in_parts([(10,), (3, 4)], ranks=2)]
        [5, 6]
    """
    return [Flat(tuple(shape), ranks) for shape in shapes]


def weight_in_parts(shape: tuple[int, ...], ranks: int) -> Layout:
    """Return the layout of a weight with ``shard="all"``: equal parts, or copies of a small one.

    Example:
        >>> [type(weight_in_parts(shape, ranks=2)).__name__ for shape in ((3, 4), (40, 30))]
        ['Copy', 'Flat']
    """
    kind = Copy if math.prod(shape) < max(SMALL, ranks) else Flat
    return kind(shape, ranks)


def shared_out(
    outers: Sequence[Layout], teams: Sequence[Sequence[int]], is_elementwise: bool
) -> list[Layout]:
    """Return the layouts of the state of weights of which each replica holds a part.

    Args:
        outers: layouts of the weights.
        teams: ranks that hold the same parts, which share them out.
        is_elementwise: whether the optimizer updates each number by itself.

    Example:
        >>> from tfscale.parallel.layout import Repeated
        >>> halves = Repeated.of(Flat((8,), 2), team_ranks=(0, 1, 0, 1))
        >>> (layout,) = shared_out([halves], [[0, 2], [1, 3]], is_elementwise=True)
        >>> [list(layout.places(rank)) for rank in range(4)]
        [[0, 1], [4, 5], [2, 3], [6, 7]]
    """
    of_teams = [
        dealt([outer.part_shape(team[0]) for outer in outers], len(team), is_elementwise)
        for team in teams
    ]
    return [
        SharedOut.of(outer, teams, inners)
        for outer, inners in zip(outers, zip(*of_teams, strict=True), strict=True)
    ]


def whole(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[Layout]:
    """Return layouts in which each rank holds some arrays whole, about 1 / P of all numbers.

    The largest array comes first, and goes to the rank that holds least: no rank then holds more
    than 4/3 - 1/(3P) of the least possible (R. L. Graham, "Bounds on multiprocessing timing
    anomalies", 1969).

    Example:
        >>> [layout.owner for layout in whole([(5,), (3,), (4,)], ranks=2)]
        [0, 1, 1]
    """
    held, owners = [0] * ranks, [0] * len(shapes)
    for place in sorted(range(len(shapes)), key=lambda place: -math.prod(shapes[place])):
        owners[place] = held.index(min(held))
        held[owners[place]] += math.prod(shapes[place])
    return [Owned(tuple(shape), ranks, owner) for shape, owner in zip(shapes, owners, strict=True)]
