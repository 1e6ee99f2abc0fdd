"""A search for cheap orders of large graphs: start with much recomputation, keep what fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tfscale.training.recompute.graph import Graph, Order, last_uses, memory, more_cost
from tfscale.training.recompute.levels import (
    AGAIN,
    KEPT,
    OFTEN,
    TWICE,
    Levels,
    droppable,
    levels_of,
    order_of,
)

# The search forgets this share of the kept results, and decides about them again.
FORGOTTEN = 0.15
# It ends after so many attempts without a better order.
PATIENCE = 200
# Numbers of segments to begin with, and of segments within each.
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

Found = Callable[[Order], None]  # takes each better order


@dataclass(frozen=True)
class _State:
    levels: Levels
    order: Order
    cost: float
    memory: npt.NDArray[np.float64]


class Search:
    """A search over the levels of one graph within one budget.

    Args:
        graph: the graph.
        budget: most bytes that an order may take.
        seconds: time after which the search ends.
        found: is called with each better order.
    """

    def __init__(self, graph: Graph, budget: float, seconds: float, found: Found) -> None:
        self._graph = graph
        self._budget = budget
        self._until = time.monotonic() + seconds
        self._found = found
        self._droppable = np.array(droppable(graph), dtype=int)
        self._size = np.array([node.size for node in graph.nodes])
        self._cost = np.array([node.cost for node in graph.nodes])
        forward = ([u for u in users if u < graph.first_again] for users in graph.users)
        self._last_forward = np.array([max(users, default=-1) for users in forward])
        self._random = np.random.default_rng(0)

    def run(self, starts: Iterable[Order] = (), levels: Levels | None = None) -> Order | None:
        """Return the cheapest order that the search finds; None if it finds none.

        Args:
            starts: orders to begin with.
            levels: levels that fit, to begin with instead.
        """
        best = self._first(starts) if levels is None else self._state(levels)
        if best is None:
            return None
        self._found(best.order)
        best = self._filled(best, noise=0.0)
        self._found(best.order)
        return self._improved(best).order

    def fitting(self) -> Levels | None:
        """Return the first levels that fit; None if none do.

        The result does not depend on the machine's speed, unless the time is over.
        """
        state = self._first(())
        return None if state is None else state.levels

    def _first(self, starts: Iterable[Order]) -> _State | None:
        """Return the cheapest of the first orders, once it fits; None if none can be made to."""
        best: _State | None = None
        for levels in self._starts(starts):
            state = self._state(levels)
            if best is None or self._worth(state) < self._worth(best):
                best = state
            if self._is_over():
                break
        return self._repaired(best) if best else None

    def _worth(self, state: _State) -> tuple[float, float]:
        return max(self._budget, float(state.memory.max())), state.cost

    def _is_over(self) -> bool:
        return time.monotonic() > self._until

    def _state(self, levels: Levels) -> _State:
        order = order_of(self._graph, levels)
        return _State(levels, order, more_cost(self._graph, order), memory(self._graph, order))

    def _fits(self, state: _State) -> bool:
        return float(state.memory.max()) <= self._budget

    def _starts(self, starts: Iterable[Order]) -> Iterable[Levels]:
        """Yield the levels of given orders, and of segments within segments of several lengths."""
        for order in starts:
            yield levels_of(self._graph, order)
        for parts in PARTS:
            for inner in PARTS:
                if parts * inner <= max(1, len(self._droppable) // 2):
                    yield self._nested(parts, inner)
        often = np.zeros(len(self._graph.nodes), np.int8)
        often[self._droppable] = OFTEN
        yield often

    def _nested(self, parts: int, inner: int) -> Levels:
        """Return levels that keep borders between segments, and within them borders for a while."""
        nodes = self._droppable
        total = self._size[nodes].cumsum()
        place = (total - self._size[nodes]) / max(total[-1], 1e-9)
        levels = np.zeros(len(self._graph.nodes), np.int8)
        levels[nodes] = TWICE if inner > 1 else AGAIN
        for count, level in ((parts * inner, AGAIN), (parts, KEPT)):
            part = np.minimum((count * place).astype(int), count - 1)
            for border in nodes[np.flatnonzero(np.diff(part)) + 1]:
                behind = self._last_forward[:border] >= border
                levels[:border][behind & (levels[:border] > level)] = level
        return levels

    def _repaired(self, state: _State) -> _State | None:
        """Drop results where the memory is too small, until the order fits; None if none does."""
        while not self._fits(state):
            place = int(state.memory.argmax())
            levels = self._lowered(state, place)
            if levels is None or self._is_over():
                return None
            state = self._state(levels)
        return state

    def _lowered(self, state: _State, place: int) -> Levels | None:
        """Raise the levels of results that are only in memory at a place for a later use."""
        last = np.array(last_uses(self._graph, state.order))
        order = np.array(state.order)
        now = order[place]
        waiting = order[: place + 1][last[: place + 1] > place]
        used = {*self._graph.nodes[now].needs, int(now)}
        nodes = np.setdiff1d(np.intersect1d(waiting, self._droppable), [*used])
        nodes = nodes[(state.levels[nodes] < OFTEN) & (self._last_forward[nodes] <= now)]
        if not len(nodes):
            return None
        price = self._cost[nodes] * np.where(state.levels[nodes] == KEPT, 1, 4)
        sorted_nodes = nodes[np.argsort(price / np.maximum(self._size[nodes], 1e-9))]
        lacking = state.memory[place] - self._budget
        count = int(np.searchsorted(np.cumsum(self._size[sorted_nodes]), lacking)) + 1
        levels: Levels = state.levels.copy()
        levels[sorted_nodes[:count]] += 1
        return levels

    def _filled(self, state: _State, noise: float) -> _State:
        """Keep results where memory is left, the most expensive per byte first."""
        while True:
            kept = self._fitting(state, noise)
            if not kept:
                return state
            levels = state.levels.copy()
            levels[kept] = KEPT
            after = self._state(levels)
            if not self._fits(after):  # rounding alone; keep the order that fits
                return state
            state = after

    def _fitting(self, state: _State, noise: float) -> list[int]:
        """Return dropped nodes that fit into memory together, if they are kept.

        A kept result takes memory from its last use in the forward pass until the moment in which
        it would be computed again, and none elsewhere.
        """
        firsts: dict[int, int] = {}
        times = np.bincount(state.order, minlength=len(self._graph.nodes)) - 1
        for place in range(self._graph.first_again, len(state.order)):
            firsts.setdefault(state.order[place], place)
        last = last_uses(self._graph, state.order)
        nodes = np.flatnonzero(times > 0)
        worth = self._cost[nodes] * times[nodes] / np.maximum(self._size[nodes], 1e-9)
        worth *= np.exp(noise * self._random.standard_normal(len(nodes)))
        taken, kept = state.memory.copy(), []
        for number in nodes[np.argsort(-worth)]:
            span = slice(last[number] + 1, firsts[int(number)])  # a node's first place is itself
            if times[number] == 1 and taken[span].size:
                fits = taken[span].max() + self._size[number] <= self._budget
            else:
                fits = False
            if fits:
                taken[span] += self._size[number]
                kept.append(int(number))
        return kept or self._one_often(state, nodes[times[nodes] > 1])

    def _one_often(self, state: _State, nodes: npt.NDArray[np.int64]) -> list[int]:
        """Return one node that is computed often, and fits if it is kept."""
        for number in nodes[np.argsort(-self._cost[nodes])]:
            if self._is_over():
                return []
            levels = state.levels.copy()
            levels[number] = KEPT
            if self._fits(self._state(levels)):
                return [int(number)]
        return []

    def _improved(self, best: _State) -> _State:
        """Forget some decisions and decide again, as long as that helps now and then."""
        failed = 0
        while failed < PATIENCE and best.cost > 0 and not self._is_over():
            levels = best.levels.copy()
            kept = self._droppable[levels[self._droppable] == KEPT]
            share = FORGOTTEN * self._random.random()
            start = self._random.integers(len(self._droppable))
            window = self._droppable[start : start + max(2, len(self._droppable) // 4)]
            pool = kept if self._random.random() < 0.5 else np.intersect1d(kept, window)
            levels[pool[self._random.random(len(pool)) < max(share, 2 / (len(pool) + 1))]] = AGAIN
            state = self._repaired(self._state(levels))
            if state is not None:
                state = self._filled(state, noise=0.5)
            failed += 1
            if state is not None and state.cost < best.cost * (1 - 1e-9):
                best, failed = state, 0
                self._found(best.order)
        return best
