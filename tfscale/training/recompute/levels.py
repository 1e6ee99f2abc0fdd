"""Orders made from one decision for each node: keep its result, or how often to compute it again.

The decisions take effect when the nodes behind ``graph.first_again`` begin, which is the backward
pass. So they describe many orders by few numbers, and a search over them is quick.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tfscale.training.recompute.graph import Graph, Order

# KEPT: the result stays. AGAIN: it is computed again when it is first needed, and then stays.
# TWICE: likewise, unless a result with the level AGAIN is needed in between; then it is freed
# first. OFTEN: it is freed whenever a node of the backward pass has used it.
KEPT, AGAIN, TWICE, OFTEN = 0, 1, 2, 3

Levels = npt.NDArray[np.int8]


def droppable(graph: Graph) -> list[int]:
    """Return the nodes whose results the backward pass needs and may compute again."""
    first = graph.first_again
    return [
        number
        for number in range(first)
        if not graph.nodes[number].once and max(graph.users[number], default=0) >= first
    ]


def order_of(graph: Graph, levels: Sequence[int] | Levels) -> Order:
    """Return the order of some decisions.

    Each node of the backward pass first gets the results that it lacks, computed from those in
    memory.
    """
    order: list[int] = []
    inside = [False] * len(graph.nodes)
    for number in range(len(graph.nodes)):
        if number == graph.first_again:
            inside[:number] = [level == KEPT for level in levels[:number]]
        if number >= graph.first_again:
            lacking, near = _lacking(graph, inside, levels, number)
            order += sorted(lacking)
            for again in lacking:
                inside[again] = levels[again] <= AGAIN or again in near
        order.append(number)
        inside[number] = True
    return tuple(order)


def _lacking(
    graph: Graph, inside: Sequence[bool], levels: Sequence[int] | Levels, number: int
) -> tuple[set[int], set[int]]:
    """Return the nodes to compute again before a node, and those of level TWICE that stay."""
    near: set[int] = set()
    lacking: set[int] = set()
    waiting = [(need, True) for need in graph.nodes[number].needs if not inside[need]]
    while waiting:
        need, is_near = waiting.pop()
        is_near = is_near and levels[need] == TWICE
        if need in lacking and (not is_near or need in near):
            continue
        lacking.add(need)
        if is_near:
            near.add(need)
        waiting += [(one, is_near) for one in graph.nodes[need].needs if not inside[one]]
    return lacking, near


def levels_of(graph: Graph, order: Sequence[int]) -> Levels:
    """Return decisions that resemble an order: the nodes that it computes again are dropped."""
    times = np.bincount(order, minlength=len(graph.nodes)) - 1
    result: Levels = np.choose(np.minimum(times, 2), [KEPT, AGAIN, OFTEN]).astype(np.int8)
    return result
