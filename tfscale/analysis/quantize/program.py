r"""The choice of a width for each layer as an integer program, which SciPy's HiGHS solves.

.. math::
    \min_x \sum_{l, b} \Omega_{l b} x_{l b} \quad \text{with} \quad
    \sum_b x_{l b} = 1, \quad \sum_{l, b} u^r_{l b} x_{l b} \le U^r, \quad x_{l b} \in \{0, 1\}

:math:`\Omega_{l b}` is the cost of layer l with b bits, :math:`u^r_{l b}` what that takes of a
resource r, such as bytes, and :math:`U^r` the limit. Tied layers are one row of the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfscale.support.quiet import quiet_stdout

# HiGHS ends at an absolute gap of 1e-6, so costs are scaled to this sum.
_SUM_OF_COSTS = 1e4
# HiGHS's tolerance of 1e-6 is absolute, so limits are scaled to this number.
_LIMIT = 1e3
_CUTS = 100  # choices that rounding lets pass a limit, before the program gives up
_OPTIMAL, _INFEASIBLE = 0, 2
Table = Mapping[int, float]  # a number for each width


class NoSciPyError(ImportError):
    """Raised if a plan is asked for and SciPy is missing."""

    def __init__(self) -> None:
        super().__init__("quantize.plan solves an integer program by SciPy: pip install scipy")


class InfeasibleError(ValueError):
    """Raised if no choice of widths keeps all limits; ``smallest`` has what each could be.

    Args:
        message: the error in words.
        smallest: for each resource, the smallest use, while all other limits are kept if they can
            be.
    """

    def __init__(self, message: str, smallest: Mapping[str, float]) -> None:
        super().__init__(message)
        self.smallest = dict(smallest)


@dataclasses.dataclass(frozen=True)
class Resource:
    """A limited resource.

    Args:
        name: name of the resource, for messages.
        uses: use of each layer, by width.
        limit: largest sum of uses.
        shown: a function that writes an amount, for messages.
    """

    name: str
    uses: Sequence[Table]
    limit: float
    shown: Any = "{:.6g}".format

    def used(self, chosen: Sequence[int]) -> float:
        """Return the sum of uses of a choice of widths."""
        return sum(float(uses[bits]) for uses, bits in zip(self.uses, chosen, strict=True))

    def has_room(self, chosen: Sequence[int]) -> bool:
        """Return whether a choice of widths keeps the limit."""
        return self.used(chosen) <= self.limit * (1 + 1e-12)


@dataclasses.dataclass(frozen=True)
class Solution:
    """A choice of widths.

    Args:
        bits: width of each layer.
        cost: sum of costs.
        proven: whether HiGHS proved that no choice costs less; False if time ran out.
    """

    bits: tuple[int, ...]
    cost: float
    proven: bool


class Program:
    """A choice of a width for each layer, within limits.

    Args:
        costs: cost of each layer, by width. A layer's widths are the keys.
        resources: what is limited.
        ties: lists of layers, by index, that get the same width.
    """

    def __init__(
        self,
        costs: Sequence[Table],
        resources: Sequence[Resource] = (),
        ties: Sequence[Sequence[int]] = (),
    ) -> None:
        self.costs, self.resources = costs, tuple(resources)
        self.groups = _united(len(costs), ties)
        self._choices = [
            (group, bits) for group in self.groups for bits in self._common_widths(group)
        ]

    def solve(self, seconds: float = 60.0) -> Solution:
        """Return the cheapest choice that keeps all limits; raise ``InfeasibleError`` if none does.

        Args:
            seconds: time limit of HiGHS.
        """
        for resource in self.resources:
            self._refuse_impossible(resource)
        found = self._minimize(self.costs, self.resources, seconds)
        if found is None:
            self._refuse_together(seconds)
            raise TimeoutError(f"HiGHS found no choice of widths within {seconds:g} s")
        chosen, proven = found
        return Solution(chosen, self._cost(chosen), proven)

    def solutions(self, count: int, seconds: float = 60.0) -> list[Solution]:
        """Return the cheapest choices that keep all limits, the cheapest first.

        Args:
            count: number of choices; the result is shorter if fewer keep all limits.
            seconds: time limit of HiGHS for each of them.
        """
        found: list[Solution] = []
        for _ in range(count):
            known = [self._taken(one.bits) for one in found]
            best = self._minimize(self.costs, self.resources, seconds, known)
            if best is None:
                break
            found.append(Solution(best[0], self._cost(best[0]), best[1]))
        return found

    def smallest(self, resource: Resource, keep: Sequence[Resource] = (), seconds: float = 60.0
                 ) -> float | None:  # fmt: skip
        """Return the smallest use of a resource, within the limits of others; None if none fits."""
        found = self._minimize(resource.uses, keep, seconds)
        return None if found is None else resource.used(found[0])

    # ------------------------------------------------------------- the program

    def _cost(self, chosen: Sequence[int]) -> float:
        return sum(float(costs[bits]) for costs, bits in zip(self.costs, chosen, strict=True))

    def _taken(self, chosen: Sequence[int]) -> np.ndarray:
        return np.array([chosen[group[0]] == bits for group, bits in self._choices])

    def _common_widths(self, group: Sequence[int]) -> list[int]:
        common = [b for b in self.costs[group[0]] if all(b in self.costs[i] for i in group)]
        if not common:
            each = "; ".join(f"layer {i}: {', '.join(map(str, self.costs[i]))}" for i in group)
            raise ValueError(f"tied layers have no width in common: {each}")
        return common

    def _sums(self, tables: Sequence[Table]) -> np.ndarray:
        return np.array(
            [sum(float(tables[i][bits]) for i in group) for group, bits in self._choices]
        )

    def _minimize(
        self, tables: Sequence[Table], resources: Sequence[Resource], seconds: float,
        known: Sequence[np.ndarray] = (),
    ) -> tuple[tuple[int, ...], bool] | None:  # fmt: skip
        """Return the choice with the smallest sum, and whether that is proven; None if none fits.

        HiGHS may exceed a limit by a rounding error. Such a choice is excluded, and the program is
        solved again. So are choices that the caller knows already.
        """
        costs = self._sums(tables)
        size = self._largest_sum(costs)
        costs = costs * (_SUM_OF_COSTS / size) if size > 0 else costs
        excluded = list(known)
        for _ in range(_CUTS):
            found = _milp(costs, self._constraints(resources, excluded), seconds)
            if found.x is None:
                return None
            taken = found.x > 0.5
            chosen = self._widths(taken)
            if all(resource.has_room(chosen) for resource in resources):
                return chosen, found.status == _OPTIMAL
            excluded.append(taken)
        raise ValueError(
            f"{_CUTS} choices exceed a limit by rounding errors only: change the limit by 0.0001%"
        )

    def _largest_sum(self, costs: np.ndarray) -> float:
        largest: dict[int, float] = {}
        for (group, _), cost in zip(self._choices, costs, strict=True):
            largest[group[0]] = max(largest.get(group[0], 0.0), abs(float(cost)))
        return sum(largest.values())

    def _widths(self, taken: np.ndarray) -> tuple[int, ...]:
        chosen = [0] * len(self.costs)
        for (group, bits), is_taken in zip(self._choices, taken, strict=True):
            for i in group if is_taken else ():
                chosen[i] = bits
        return tuple(chosen)

    def _constraints(
        self, resources: Sequence[Resource], excluded: Sequence[np.ndarray]
    ) -> list[Any]:
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array

        places = {group[0]: row for row, group in enumerate(self.groups)}
        rows = [places[group[0]] for group, _ in self._choices]
        count = len(self._choices)
        one_each = csr_array((np.ones(count), (rows, range(count))), (len(self.groups), count))
        found = [LinearConstraint(one_each, 1, 1)]
        for resource in resources:
            uses = self._sums(resource.uses)
            unit = (resource.limit or 1.0) / _LIMIT
            found.append(LinearConstraint(uses[np.newaxis] / unit, -np.inf, resource.limit / unit))
        for taken in excluded:
            found.append(LinearConstraint(taken[np.newaxis] * 1.0, -np.inf, len(self.groups) - 1))
        return found

    # ------------------------------------------------------------- what cannot be

    def _refuse_impossible(self, resource: Resource) -> None:
        uses = self._sums(resource.uses)
        least: dict[tuple[int, ...], tuple[int, float]] = {}
        for (group, bits), use in zip(self._choices, uses, strict=True):
            best = least.get(group, (bits, use))
            least[group] = min(best, (bits, use), key=lambda one: one[1])
        narrowest = {i: bits for group, (bits, _) in least.items() for i in group}
        chosen = [narrowest[i] for i in range(len(self.costs))]
        if not resource.has_room(chosen):
            least_use = resource.used(chosen)
            raise InfeasibleError(
                f"{resource.name} is at most {resource.shown(resource.limit)}, and the smallest "
                f"possible is {resource.shown(least_use)}: raise the limit, or allow smaller "
                "widths",
                {resource.name: least_use},
            )

    def _refuse_together(self, seconds: float) -> None:
        """Raise if each limit can be kept alone, but not all of them together."""
        least: dict[str, float] = {}
        for resource in self.resources:
            others = [one for one in self.resources if one is not resource]
            found = self.smallest(resource, others, seconds)
            if found is not None:
                least[resource.name] = found
        if all(one.name in least and least[one.name] <= one.limit for one in self.resources):
            return  # there is a choice, and time ran out
        told = [
            f"the smallest possible {one.name} within the other limits is "
            f"{one.shown(least[one.name])} (limit {one.shown(one.limit)})"
            if one.name in least
            else f"the limits other than {one.name} contradict each other"
            for one in self.resources
        ]
        raise InfeasibleError(f"no widths keep all limits together: {'; '.join(told)}", least)


def _united(count: int, ties: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the groups of indices that get the same width; ties that overlap are one group."""
    first = list(range(count))

    def root(i: int) -> int:
        while first[i] != i:
            i = first[i]
        return i

    for tie in ties:
        for i in tie:
            a, b = sorted((root(tie[0]), root(i)))
            first[b] = a
    groups: dict[int, list[int]] = {}
    for i in range(count):
        groups.setdefault(root(i), []).append(i)
    return [tuple(group) for group in groups.values()]


def _milp(costs: np.ndarray, constraints: Sequence[Any], seconds: float) -> Any:
    try:
        from scipy.optimize import Bounds, milp
    except ImportError as error:
        raise NoSciPyError from error
    with quiet_stdout():
        found = milp(
            costs,
            integrality=np.ones(len(costs)),
            bounds=Bounds(0, 1),
            constraints=constraints,
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
    if found.x is None and found.status not in (_INFEASIBLE, 1):
        raise RuntimeError(f"HiGHS did not solve the integer program: {found.message}")
    return found
