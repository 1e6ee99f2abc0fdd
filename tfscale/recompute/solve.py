"""Which units to compute again: the cheapest choice that fits into the memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

# More choices than these at one place are thinned out: the result is then no proven optimum.
MOST = 4000


@dataclass(frozen=True)
class Chain:
    """What n units need, in the order in which they run.

    Args:
        saved: bytes that each unit keeps for its backward pass.
        forward: bytes beside those, while it runs forward.
        backward: bytes beside those, while it runs backward.
        cost: of running it again.
        last_cost: the same where it is the last of its segment, whose results are kept.
        gradient: bytes of the gradients that come in at each of the n + 1 borders.
        leaving: [a, b]: what the segment a..b-1 keeps although it is computed again.
        entering: [a, b]: what others must keep for it, and would not otherwise.
    """

    saved: Numbers
    forward: Numbers
    backward: Numbers
    cost: Numbers
    last_cost: Numbers
    gradient: Numbers
    leaving: Numbers
    entering: Numbers


@dataclass(frozen=True)
class Solution:
    """Segments to compute again, and whether they are proven to be the cheapest."""

    segments: tuple[range, ...]
    cost: float
    exact: bool


@dataclass(frozen=True)
class _Front:
    """Ways to get to a border: none is worse than another in both memory and cost."""

    memory: Numbers
    cost: Numbers
    origin: npt.NDArray[np.int64]  # the border where the last piece began; -1: it was kept
    index: npt.NDArray[np.int64]  # which way led there


def solve(chain: Chain, budget: float) -> Solution | None:
    """The cheapest segments whose step needs no more than a budget; None if there are none.

    Let P be what the pieces before a place leave in memory. A unit i that is kept adds S[i]
    to it, and needs P + S[i] + B[i] when its gradients are computed. A segment a..b-1 adds
    L[a, b], and needs P + max over its units i of S[a] + ... + S[i] + B[i]. So a way to a
    place counts by P and its cost only: of all ways to each border those are kept that no
    other beats in both. This is dynamic programming over Pareto fronts, and exact.
    """
    count = len(chain.saved)
    nothing = np.zeros(1)
    fronts = [_Front(nothing, nothing, np.array([-1]), np.array([-1]))]
    exact = True
    for border in range(1, count + 1):
        front, thinned = _prune(_ways_to(chain, fronts, border, budget))
        fronts.append(front)
        exact = exact and not thinned
    if not len(fronts[count].cost):
        return None
    best = int(np.argmin(fronts[count].cost))
    return Solution(_trace_back(fronts, best), float(fronts[count].cost[best]), exact)


def _ways_to(chain: Chain, fronts: list[_Front], border: int, budget: float) -> list[_Front]:
    unit = border - 1
    before = fronts[unit]
    need = max(chain.saved[unit] + chain.backward[unit], chain.forward[unit])
    ways = [_extended(before, -1, budget - need, chain.saved[unit], 0.0)]
    inner = _inner(chain, border)
    cost = np.cumsum(np.r_[0.0, chain.cost])
    for start in range(unit, -1, -1):
        entering = chain.entering[start, border]
        limit = budget - inner[start] - entering
        if limit < 0:
            break
        price = cost[unit] - cost[start] + chain.last_cost[unit]
        stays = chain.leaving[start, border] + entering
        ways.append(_extended(fronts[start], start, limit, stays, price))
    return ways


def _inner(chain: Chain, border: int) -> Numbers:
    """What a segment that ends at the border needs, by its start."""
    total = np.cumsum(np.r_[0.0, chain.saved])
    backward = total[1 : border + 1] + chain.backward[:border]
    forward = total[:border] + chain.forward[:border] + chain.gradient[border]
    most: Numbers = np.maximum.accumulate(np.maximum(backward, forward)[::-1])[::-1]
    inner: Numbers = most - total[:border]
    return inner


def _extended(front: _Front, origin: int, limit: float, stays: float, cost: float) -> _Front:
    fits = np.flatnonzero(front.memory <= limit)
    return _Front(
        front.memory[fits] + stays, front.cost[fits] + cost, np.full(len(fits), origin), fits
    )


def _prune(ways: list[_Front]) -> tuple[_Front, bool]:
    def joined(name: str) -> Any:
        return np.concatenate([getattr(way, name) for way in ways])

    memory, cost = joined("memory"), joined("cost")
    order = np.lexsort((cost, memory))
    cheapest = np.minimum.accumulate(np.r_[np.inf, cost[order]])
    order = order[cost[order] < cheapest[:-1]]
    thinned = len(order) > MOST
    if thinned:
        order = order[np.linspace(0, len(order) - 1, MOST).astype(int)]
    return _Front(memory[order], cost[order], joined("origin")[order], joined("index")[order]), (
        thinned
    )


def _trace_back(fronts: list[_Front], index: int) -> tuple[range, ...]:
    segments = []
    border = len(fronts) - 1
    while border:
        front = fronts[border]
        origin = int(front.origin[index])
        start = border - 1 if origin < 0 else origin
        if origin >= 0:
            segments.append(range(start, border))
        index = int(front.index[index])
        border = start
    return tuple(reversed(segments))
