"""Orders made from one decision for each node: keep its result, compute it again once, or often.

The decisions take effect when the nodes behind ``graph.first_again`` begin, which is the backward
pass. So they describe many orders by few numbers, and a search over them is quick.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tfscale.training.recompute.graph import Graph, Order

KEPT, AGAIN, OFTEN = 0, 1, 2

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
    memory. A result with the level AGAIN then stays until its last use; one with the level OFTEN is
    freed at once.
    """
    order: list[int] = []
    inside = [False] * len(graph.nodes)
    for number in range(len(graph.nodes)):
        if number == graph.first_again:
            inside[:number] = [level == KEPT for level in levels[:number]]
        lacking = _lacking(graph, inside, number) if number >= graph.first_again else []
        order += [*lacking, number]
        inside[number] = True
        for again in lacking:
            inside[again] = levels[again] != OFTEN
    return tuple(order)


def _lacking(graph: Graph, inside: Sequence[bool], number: int) -> list[int]:
    """Return the nodes to compute again before a node, in order."""
    found: set[int] = set()
    waiting = [need for need in graph.nodes[number].needs if not inside[need]]
    while waiting:
        need = waiting.pop()
        if need not in found:
            found.add(need)
            waiting += [one for one in graph.nodes[need].needs if not inside[one]]
    return sorted(found)


def levels_of(graph: Graph, order: Sequence[int]) -> Levels:
    """Return decisions that resemble an order: each node that it computes again is dropped."""
    times = np.bincount(order, minlength=len(graph.nodes)) - 1
    result: Levels = np.minimum(times, OFTEN).astype(np.int8)
    return result
