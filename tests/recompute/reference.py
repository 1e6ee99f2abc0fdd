"""A plain reference solver and random graphs for the tests of optimal orders."""

import heapq
import itertools

import numpy as np

from tfscale.training.recompute.graph import Graph, Node


def random_graph(seed, most=10):
    """A graph of few nodes with small whole numbers, sometimes a chain with its gradients."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, most + 1))
    gradients = rng.random() < 0.5
    nodes = []
    for number in range(count):
        if gradients and number > count // 2:
            needs = {number - 1, count - number, max(0, count - number - 1)} - {number}
        else:
            needs = {i for i in range(number) if rng.random() < (0.9 if i == number - 1 else 0.3)}
        extra = float(rng.integers(0, 2))
        cost, size = (float(rng.integers(1, 6)) for _ in range(2))
        nodes.append(Node(cost, size, tuple(sorted(needs)), extra, bool(rng.random() < 0.1)))
    first = 0 if rng.random() < 0.5 else count // 2
    return Graph(tuple(nodes), float(rng.integers(0, 3)), first)


def cheapest(graph, budget):
    """The cost of the cheapest recomputation, by Dijkstra's algorithm; None if nothing fits.

    A state is the number of nodes that have run and the set of results in memory. From there a
    node is computed, or a result is freed.
    """
    start = (0, frozenset())
    heap, number, done = [(0.0, 0, start)], itertools.count(1), set()
    while heap:
        cost, _, state = heapq.heappop(heap)
        if state in done:
            continue
        done.add(state)
        ran, inside = state
        if ran == len(graph.nodes):
            return cost
        taken = graph.fixed + sum(graph.nodes[i].size for i in inside)
        for i in range(ran + 1):
            node = graph.nodes[i]
            if i in inside:
                heapq.heappush(heap, (cost, next(number), (ran, inside - {i})))
                continue
            if not inside.issuperset(node.needs) or taken + node.size + node.extra > budget:
                continue
            if i == ran:
                heapq.heappush(heap, (cost, next(number), (ran + 1, inside | {i})))
            elif not node.once and ran >= graph.first_again:
                heapq.heappush(heap, (cost + node.cost, next(number), (ran, inside | {i})))
    return None
