"""Which units to compute again: the cheapest choice that fits into the memory."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

# So many ways, shared out among all borders, are kept at most; others are thinned out, and the
# result is no proven optimum then. The time that it takes grows with this times the units.
MOST = 50_000


@dataclass(frozen=True)
class Chain:
    """What n units need, in the order in which they run.

    Args:
        saved: bytes that each unit keeps for its backward pass.
        forward: bytes in addition to the saved ones, while it runs forward.
        backward: bytes in addition to the saved ones, while it runs backward.
        cost: of running it again.
        last_cost: the same where it is the last of its segment, whose results are kept.
        gradient: bytes of the gradients that come in at each of the n + 1 borders.
        leaving: [a, b]: bytes that the segment a..b-1 keeps although it is computed again.
        entering: [a, b]: bytes that other units keep only because this segment needs them.
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


def solve(chain: Chain, budget: float) -> Solution | None:
    """The cheapest segments whose step needs no more than a budget; None if there are none.

    Let P be what the pieces before a place leave in memory. A unit i that is kept adds S[i]
    to it, and needs P + S[i] + B[i] when its gradients are computed. A segment a..b-1 adds
    L[a, b], and needs P + max over its units i of S[a] + ... + S[i] + B[i]. So only P
    and the cost of a way to a place matter: of all ways to each border the solver keeps those
    that no other beats in both. This is dynamic programming over Pareto fronts, and exact.
    """
    count = len(chain.saved)
    most = MOST // count
    ways = _START
    exact = True
    for border in range(1, count + 1):
        front = _prune(_kept(chain, ways, border, budget), _again(chain, ways, border, budget))
        exact = exact and len(front.cost) <= most
        ways = ways.joined(front.thinned(most))
    ends = np.flatnonzero(ways.border == count)
    if not len(ends):
        return None
    best = int(ends[np.argmin(ways.cost[ends])])
    return Solution(_trace_back(ways, best), float(ways.cost[best]), exact)


@dataclass(frozen=True)
class _Ways:
    """Ways to borders, in the order of these: no way to a border is worse in both than another.

    Args:
        memory: what is left in it.
        cost: of what is computed again.
        border: where it has come to.
        before: the number of the way that it goes on from.
        again: whether what it has added is computed again.
    """

    memory: Numbers
    cost: Numbers
    border: npt.NDArray[np.int64]
    before: npt.NDArray[np.int64]
    again: npt.NDArray[np.bool_]

    def chosen(self, which: npt.NDArray[np.int64]) -> _Ways:
        return _Ways(*(getattr(self, one.name)[which] for one in fields(self)))

    def joined(self, other: _Ways) -> _Ways:
        both = ((getattr(self, one.name), getattr(other, one.name)) for one in fields(self))
        return _Ways(*map(np.concatenate, both))

    def thinned(self, most: int) -> _Ways:
        """About so many of these ways to one border, evenly spread over memory."""
        if len(self.cost) <= most:
            return self
        levels = np.linspace(self.memory[0], self.memory[-1], most)
        return self.chosen(np.unique(np.searchsorted(self.memory, levels, side="right") - 1))


_START = _Ways(np.zeros(1), np.zeros(1), np.array([0]), np.array([-1]), np.array([False]))


def _kept(chain: Chain, ways: _Ways, border: int, budget: float) -> _Ways:
    """Ways that keep the unit before the border."""
    unit = border - 1
    need = max(chain.saved[unit] + chain.backward[unit], chain.forward[unit])
    first = int(np.searchsorted(ways.border, unit))
    fits = first + np.flatnonzero(ways.memory[first:] <= budget - need)
    return _Ways(
        ways.memory[fits] + chain.saved[unit],
        ways.cost[fits],
        np.full(len(fits), border),
        fits,
        np.full(len(fits), False),
    )


def _again(chain: Chain, ways: _Ways, border: int, budget: float) -> _Ways:
    """Ways whose last segment ends at the border."""
    entering = chain.entering[:border, border]
    limit = budget - _inner(chain, border) - entering
    stays = chain.leaving[:border, border] + entering
    cost = np.cumsum(np.r_[0.0, chain.cost[: border - 1]])
    price = cost[-1] - cost + chain.last_cost[border - 1]
    first = int(np.searchsorted(ways.border, np.argmax(limit >= 0)))
    start = ways.border[first:]
    fits = np.flatnonzero(ways.memory[first:] <= limit[start])
    start = start[fits]
    fits += first
    return _Ways(
        ways.memory[fits] + stays[start],
        ways.cost[fits] + price[start],
        np.full(len(fits), border),
        fits,
        np.full(len(fits), True),
    )


def _inner(chain: Chain, border: int) -> Numbers:
    """What a segment that ends at the border needs, by its start."""
    total = np.cumsum(np.r_[0.0, chain.saved])
    backward = total[1 : border + 1] + chain.backward[:border]
    forward = total[:border] + chain.forward[:border] + chain.gradient[border]
    most: Numbers = np.maximum.accumulate(np.maximum(backward, forward)[::-1])[::-1]
    inner: Numbers = most - total[:border]
    return inner


def _prune(kept: _Ways, again: _Ways) -> _Ways:
    """Those that no other beats in both memory and cost."""
    memory = np.r_[kept.memory, again.memory]
    cost = np.r_[kept.cost, again.cost]
    order = np.argsort(memory)
    cheapest = np.minimum.accumulate(np.r_[np.inf, cost[order]])
    order = order[cost[order] < cheapest[:-1]]
    last_of_equals = np.diff(memory[order], append=np.inf) > 0
    return kept.joined(again).chosen(order[last_of_equals])


def _trace_back(ways: _Ways, last: int) -> tuple[range, ...]:
    segments = []
    while (before := int(ways.before[last])) >= 0:
        if ways.again[last]:
            segments.append(range(int(ways.border[before]), int(ways.border[last])))
        last = before
    return tuple(reversed(segments))
