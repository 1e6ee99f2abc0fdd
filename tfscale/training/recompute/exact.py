"""The cheapest order of a small graph, found by Dijkstra's algorithm over states of memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tfscale.training.recompute.graph import Graph, Order

MOST_NODES = 12  # the number of states doubles with each node

_State = tuple[int, int]  # the number of nodes that have run, and the results in memory as bits


def exact(graph: Graph, budget: float) -> Order | None:
    """Return the cheapest order within a budget; None if there is none.

    A state says how many nodes have run, and which results are in memory. A move computes a node,
    or frees a result. Freeing is free, so only a lack of memory makes it worth a move.
    """
    search = _Search(graph, budget)
    start: _State = (0, 0)
    cheapest: dict[_State, float] = {start: 0.0}
    before: dict[_State, tuple[_State, int]] = {}
    heap = [(0.0, 0, start)]
    while heap:
        cost, _, state = heapq.heappop(heap)
        if cost > cheapest[state]:
            continue
        if state[0] == len(graph.nodes):
            return _trace_back(before, state)
        for price, after, computed in search.moves(state):
            if cost + price < cheapest.get(after, float("inf")):
                cheapest[after] = cost + price
                before[after] = (state, computed)
                heapq.heappush(heap, (cost + price, -after[0], after))
    return None


class _Search:
    def __init__(self, graph: Graph, budget: float) -> None:
        self._graph = graph
        self._room = budget - graph.fixed
        self._needs = [sum(1 << need for need in set(node.needs)) for node in graph.nodes]

    def moves(self, state: _State) -> Iterator[tuple[float, _State, int]]:
        """Yield the price of each move, the state behind it, and the node it computes or -1."""
        done, inside = state
        taken = sum(node.size for i, node in enumerate(self._graph.nodes) if inside >> i & 1)
        lacking = False
        for number in self._computable(done, inside):
            node = self._graph.nodes[number]
            if taken + node.size + node.extra > self._room:
                lacking = True
            elif number == done:
                yield 0.0, (done + 1, inside | 1 << number), number
            else:
                yield node.cost, (done, inside | 1 << number), number
        if lacking:
            for number in range(done):
                if inside >> number & 1:
                    yield 0.0, (done, inside & ~(1 << number)), -1

    def _computable(self, done: int, inside: int) -> Iterator[int]:
        for number in range(done + 1):
            node = self._graph.nodes[number]
            if inside >> number & 1 or self._needs[number] & ~inside:
                continue
            if number == done or not (node.once or done < self._graph.first_again):
                yield number


def _trace_back(before: dict[_State, tuple[_State, int]], state: _State) -> Order:
    order = []
    while state in before:
        state, computed = before[state]
        if computed >= 0:
            order.append(computed)
    return tuple(reversed(order))
