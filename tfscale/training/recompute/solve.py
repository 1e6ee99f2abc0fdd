"""Solver for the units to compute again: the cheapest choice that fits into memory."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

# The solver keeps at most this number of partial solutions, shared by all borders. It thins out the
# others, and the result is then not proven to be optimal. The time grows with this number times the
# units.
MOST = 50_000


@dataclass(frozen=True)
class Chain:
    """The memory and the cost of n units, in the order in which they run.

    Args:
        saved: bytes that each unit keeps for its backward pass.
        forward: bytes in addition to the saved ones, while it runs forward.
        backward: bytes in addition to the saved ones, while it runs backward.
        cost: cost of running each unit again.
        last_cost: cost of running it again as the last unit of a segment, whose results are kept.
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
    """Return the cheapest segments whose step stays within a budget; None if there are none.

    Let P be the memory that the units before a border leave in use. A unit i that is kept adds S[i]
    to P, and needs P + S[i] + B[i] when its gradients are computed. A segment a..b-1 adds L[a, b],
    and needs P + max over its units i of S[a] + ... + S[i] + B[i]. So only P and the cost of a
    partial solution matter: for each border the solver keeps the partial solutions that no other
    beats in both. This is dynamic programming over Pareto fronts, and exact.
    """
    count = len(chain.saved)
    most = MOST // count
    partials = _START
    exact = True
    for border in range(1, count + 1):
        front = _prune(
            _kept(chain, partials, border, budget), _again(chain, partials, border, budget)
        )
        exact = exact and len(front.cost) <= most
        partials = partials.joined(front.thinned(most))
    ends = np.flatnonzero(partials.border == count)
    if not len(ends):
        return None
    best = int(ends[np.argmin(partials.cost[ends])])
    return Solution(_trace_back(partials, best), float(partials.cost[best]), exact)


@dataclass(frozen=True)
class _Partials:
    """Partial solutions, sorted by border: none is worse in both memory and cost than another.

    Args:
        memory: memory that stays in use.
        cost: cost of the recomputation.
        border: border that the partial solution reaches.
        before: index of the partial solution that it extends.
        again: whether the units that it adds are computed again.
    """

    memory: Numbers
    cost: Numbers
    border: npt.NDArray[np.int64]
    before: npt.NDArray[np.int64]
    again: npt.NDArray[np.bool_]

    def chosen(self, which: npt.NDArray[np.int64]) -> _Partials:
        return _Partials(*(getattr(self, one.name)[which] for one in fields(self)))

    def joined(self, other: _Partials) -> _Partials:
        both = ((getattr(self, one.name), getattr(other, one.name)) for one in fields(self))
        return _Partials(*map(np.concatenate, both))

    def thinned(self, most: int) -> _Partials:
        """Return about ``most`` of these solutions to one border, evenly spread over memory."""
        if len(self.cost) <= most:
            return self
        levels = np.linspace(self.memory[0], self.memory[-1], most)
        return self.chosen(np.unique(np.searchsorted(self.memory, levels, side="right") - 1))


_START = _Partials(np.zeros(1), np.zeros(1), np.array([0]), np.array([-1]), np.array([False]))


def _kept(chain: Chain, partials: _Partials, border: int, budget: float) -> _Partials:
    """Return partial solutions that keep the unit before the border."""
    unit = border - 1
    need = max(chain.saved[unit] + chain.backward[unit], chain.forward[unit])
    first = int(np.searchsorted(partials.border, unit))
    fits = first + np.flatnonzero(partials.memory[first:] <= budget - need)
    return _Partials(
        partials.memory[fits] + chain.saved[unit],
        partials.cost[fits],
        np.full(len(fits), border),
        fits,
        np.full(len(fits), False),
    )


def _again(chain: Chain, partials: _Partials, border: int, budget: float) -> _Partials:
    """Return partial solutions whose last segment ends at the border."""
    entering = chain.entering[:border, border]
    limit = budget - _inner(chain, border) - entering
    stays = chain.leaving[:border, border] + entering
    cost = np.cumsum(np.r_[0.0, chain.cost[: border - 1]])
    price = cost[-1] - cost + chain.last_cost[border - 1]
    first = int(np.searchsorted(partials.border, np.argmax(limit >= 0)))
    start = partials.border[first:]
    fits = np.flatnonzero(partials.memory[first:] <= limit[start])
    start = start[fits]
    fits += first
    return _Partials(
        partials.memory[fits] + stays[start],
        partials.cost[fits] + price[start],
        np.full(len(fits), border),
        fits,
        np.full(len(fits), True),
    )


def _inner(chain: Chain, border: int) -> Numbers:
    """Return the memory that a segment needs that ends at the border, by its start."""
    total = np.cumsum(np.r_[0.0, chain.saved])
    backward = total[1 : border + 1] + chain.backward[:border]
    forward = total[:border] + chain.forward[:border] + chain.gradient[border]
    most: Numbers = np.maximum.accumulate(np.maximum(backward, forward)[::-1])[::-1]
    inner: Numbers = most - total[:border]
    return inner


def _prune(kept: _Partials, again: _Partials) -> _Partials:
    """Return the partial solutions that no other beats in both memory and cost."""
    memory = np.r_[kept.memory, again.memory]
    cost = np.r_[kept.cost, again.cost]
    order = np.argsort(memory)
    cheapest = np.minimum.accumulate(np.r_[np.inf, cost[order]])
    order = order[cost[order] < cheapest[:-1]]
    last_of_equals = np.diff(memory[order], append=np.inf) > 0
    return kept.joined(again).chosen(order[last_of_equals])


def _trace_back(partials: _Partials, last: int) -> tuple[range, ...]:
    segments = []
    while (before := int(partials.before[last])) >= 0:
        if partials.again[last]:
            segments.append(range(int(partials.border[before]), int(partials.border[last])))
        last = before
    return tuple(reversed(segments))
