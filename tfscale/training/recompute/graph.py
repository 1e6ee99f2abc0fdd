"""A training step as a graph of results, and orders that compute some results several times.

Nothing here knows TensorFlow. An order is a list of nodes, as they are computed one after the
other. The first computations of all nodes keep the graph's order; between them, nodes may be
computed again. A result stays in memory from each computation until its last use before it is
computed again: freeing a result earlier is impossible, and freeing it later never helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Order = tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """A result, and the computation that makes it.

    Args:
        cost: cost of one computation.
        size: bytes of the result.
        needs: nodes whose results the computation takes. All of them come earlier in the graph.
        extra: bytes in addition to results, while the computation runs.
        once: whether the node is never computed again.
    """

    cost: float
    size: float
    needs: tuple[int, ...] = ()
    extra: float = 0.0
    once: bool = False


@dataclass(frozen=True)
class Graph:
    """A training step: its nodes in the order of their first computations.

    Args:
        nodes: the nodes.
        fixed: bytes that are always in use.
        first_again: number of nodes that have run before any node may be computed again.
    """

    nodes: tuple[Node, ...]
    fixed: float = 0.0
    first_again: int = 0

    @cached_property
    def users(self) -> list[list[int]]:
        """The nodes that need each node."""
        result: list[list[int]] = [[] for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            for need in node.needs:
                result[need].append(number)
        return result

    @property
    def plain(self) -> Order:
        """The order that computes each node once."""
        return tuple(range(len(self.nodes)))

    @property
    def cost(self) -> float:
        """The cost of computing each node once."""
        return sum(node.cost for node in self.nodes)

    def working_set(self, number: int) -> float:
        """Return the bytes that are in use at least while a node is computed."""
        node = self.nodes[number]
        taken = sum(self.nodes[need].size for need in set(node.needs))
        return self.fixed + taken + node.size + node.extra


def more_cost(graph: Graph, order: Sequence[int]) -> float:
    """Return the cost of all computations beyond the first of each node."""
    return sum(graph.nodes[number].cost for number in order) - graph.cost


def last_uses(graph: Graph, order: Sequence[int]) -> list[int]:
    """Return for each computation of an order the place in the order of the result's last use."""
    newest = [0] * len(graph.nodes)
    last = list(range(len(order)))
    for place, number in enumerate(order):
        for need in graph.nodes[number].needs:
            last[newest[need]] = place
        newest[number] = place
    return last


def memory(graph: Graph, order: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the bytes in use during each computation of an order."""
    sizes = np.array([graph.nodes[number].size for number in order])
    extra = np.array([graph.nodes[number].extra for number in order])
    freed = np.bincount(last_uses(graph, order), weights=sizes, minlength=len(order))
    before = np.cumsum(freed) - freed
    result: npt.NDArray[np.float64] = np.cumsum(sizes) - before + extra + graph.fixed
    return result


def peak(graph: Graph, order: Sequence[int]) -> float:
    """Return the most bytes that an order has in use."""
    return float(memory(graph, order).max())


def check(graph: Graph, order: Sequence[int], budget: float = float("inf")) -> None:
    """Raise if an order does not compute the graph, or takes more memory than a budget."""
    done = 0
    for place, number in enumerate(order):
        if number == done:
            done += 1
        elif number > done:
            raise ValueError(f"place {place} computes node {number} before node {done}")
        elif graph.nodes[number].once or done < graph.first_again:
            raise ValueError(f"place {place} computes node {number} again, which is not allowed")
    if done < len(graph.nodes):
        raise ValueError(f"the order ends before node {done} of {len(graph.nodes)}")
    taken = peak(graph, order)
    if taken > budget:
        raise ValueError(f"the order takes {taken:.0f} bytes, more than the budget {budget:.0f}")
