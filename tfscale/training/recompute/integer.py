"""The cheapest order of a graph as an integer program, which SciPy's HiGHS solves.

The program is Checkmate's (Jain et al., MLSys 2020). Stage t computes node t for the first time,
and before it any earlier nodes again. ``again[t, i]`` says that stage t computes node i again,
``kept[t, i]`` that the result of node i is in memory when stage t begins, ``freed[t, i, k]`` that
it is freed when stage t has computed node k, which is i itself or needs i.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfscale.training.recompute.graph import Graph, Order

ONE = -1  # stands for a variable that is always 1, such as the first computation of a node

Terms = list[tuple[int, float]]


class NoSciPy(ImportError):
    """Raised if an integer program is asked for and SciPy is missing."""

    def __init__(self) -> None:
        super().__init__("the integer program needs SciPy: pip install scipy")


@dataclass(frozen=True)
class Solved:
    """The result of an integer program.

    Args:
        order: the cheapest order that was found, or None.
        bound: cost of recomputation that no order can be below; infinity if no order fits.
    """

    order: Order | None
    bound: float


def variables(graph: Graph) -> int:
    """Return how many variables the integer program of a graph has, about."""
    count, edges = len(graph.nodes), sum(len(node.needs) + 1 for node in graph.nodes)
    stages = count - graph.first_again
    return stages * (2 * graph.first_again + edges) + count * count // 2


def solve_integer(
    graph: Graph, budget: float, seconds: float, most: float = np.inf, relaxed: bool = False
) -> Solved:
    """Return the cheapest order within a budget, or the best within the time limit.

    Args:
        graph: the graph.
        budget: most bytes that an order may take.
        seconds: time limit.
        most: cost of recomputation above which an order is of no use.
        relaxed: whether variables may be fractions, which are rounded then. The order may exceed
            the budget.
    """
    try:
        from scipy.optimize import milp
    except ImportError as error:
        raise NoSciPy from error
    program = _Program(graph, budget, most)
    found = milp(
        program.costs(),
        integrality=0 * program.integral() if relaxed else program.integral(),
        bounds=(0, program.upper()),
        constraints=program.constraints(),
        options={"time_limit": seconds},
    )
    if found.status == 2:
        return Solved(None, np.inf)
    bound = found.fun if relaxed and found.success else getattr(found, "mip_dual_bound", None)
    bound = 0.0 if bound is None or not np.isfinite(bound) else max(0.0, float(bound))
    order = None if found.x is None else program.order(found.x)
    return Solved(order, bound)


class _Program:
    """Variables and constraints. Sizes are shares of the budget, which HiGHS solves better."""

    def __init__(self, graph: Graph, budget: float, most: float) -> None:
        self._graph = graph
        self._unit = max(budget, 1.0)
        self._budget = budget
        self._integral: list[int] = []
        self._costs: list[float] = []
        self._rows: list[tuple[Terms, float]] = []  # sums of terms that are at most a number
        self._again: dict[tuple[int, int], int] = {}
        self._kept: dict[tuple[int, int], int] = {}
        self._make_variables()
        for stage in range(len(graph.nodes)):
            self._need_what_is_there(stage)
            self._limit_memory(stage)
        if np.isfinite(most):
            priced = [(i, cost) for i, cost in enumerate(self._costs) if cost]
            self._rows.append((priced, most))

    def costs(self) -> Any:
        return np.array(self._costs)

    def integral(self) -> Any:
        return np.array(self._integral)

    def upper(self) -> Any:
        return np.ones(len(self._costs))

    def constraints(self) -> Any:
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array

        rows = [(number, *term) for number, (terms, _) in enumerate(self._rows) for term in terms]
        row, column, value = (np.array(each) for each in zip(*rows, strict=True))
        shape = (len(self._rows), len(self._costs))
        matrix = csr_array((value, (row.astype(int), column.astype(int))), shape=shape)
        return LinearConstraint(matrix, ub=np.array([most for _, most in self._rows]))

    def order(self, values: Any) -> Order:
        """Return the order of a solution: what is kept decides what is computed again."""
        nodes, order = self._graph.nodes, []
        for stage in range(len(nodes)):
            inside = {i for i in range(stage) if self._is_set(values, self._kept, stage, i)}
            lacking: set[int] = set()
            waiting = [need for need in nodes[stage].needs if need not in inside]
            waiting += [i for i in range(stage) if self._must_start(values, stage, i, inside)]
            while waiting:
                need = waiting.pop()
                if need not in lacking:
                    lacking.add(need)
                    waiting += [one for one in nodes[need].needs if one not in inside]
            order += [*sorted(lacking), stage]
        return tuple(order)

    def _must_start(self, values: Any, stage: int, number: int, inside: set[int]) -> bool:
        """Return whether a result is kept for the next stage, but not there in this one."""
        return number not in inside and self._is_set(values, self._kept, stage + 1, number)

    def _is_set(
        self, values: Any, known: dict[tuple[int, int], int], stage: int, number: int
    ) -> bool:
        variable = known.get((stage, number))
        return variable is not None and bool(values[variable] > 0.5)

    # ------------------------------------------------------------ variables

    def _new(self, integral: bool, cost: float = 0.0) -> int:
        self._integral.append(int(integral))
        self._costs.append(cost)
        return len(self._costs) - 1

    def _make_variables(self) -> None:
        nodes, first = self._graph.nodes, self._graph.first_again
        for stage in range(1, len(nodes)):
            for number in range(stage):
                users = self._graph.users[number]
                if all(user < stage and nodes[user].once for user in users):
                    continue
                self._kept[stage, number] = self._new(True)
                if stage >= first and not nodes[number].once:
                    self._again[stage, number] = self._new(True, nodes[number].cost)

    def _runs(self, stage: int, number: int) -> int | None:
        """Return the variable of a computation; None if it never happens."""
        return ONE if stage == number else self._again.get((stage, number))

    # ---------------------------------------------------------- constraints

    def _at_most(self, terms: Iterable[tuple[int | None, float]], most: float) -> None:
        known = [(variable, value) for variable, value in terms if variable is not None]
        most -= sum(value for variable, value in known if variable == ONE)
        self._rows.append(([(v, value) for v, value in known if v != ONE], most))

    def _need_what_is_there(self, stage: int) -> None:
        nodes = self._graph.nodes
        for number in range(stage + 1):
            runs = self._runs(stage, number)
            if runs is None:
                continue
            for need in nodes[number].needs:
                there = [(self._runs(stage, need), -1.0), (self._kept.get((stage, need)), -1.0)]
                self._at_most([(runs, 1.0), *there], 0.0)
        for number in range(stage + 1):
            later = self._kept.get((stage + 1, number))
            if later is not None:
                there = [(self._runs(stage, number), -1.0), (self._kept.get((stage, number)), -1.0)]
                self._at_most([(later, 1.0), *there], 0.0)

    def _limit_memory(self, stage: int) -> None:
        """Limit the memory of each computation of a stage."""
        nodes = self._graph.nodes
        room = (self._budget - self._graph.fixed) / self._unit
        kept = [self._kept.get((stage, number)) for number in range(stage)]
        taken: Terms = [
            (variable, nodes[number].size / self._unit)
            for number, variable in enumerate(kept)
            if variable is not None
        ]
        for number in range(stage + 1):
            runs = self._runs(stage, number)
            if runs is None:
                continue
            taken.append((runs, nodes[number].size / self._unit))
            self._at_most([*taken, (runs, nodes[number].extra / self._unit)], room)
            for need in {*nodes[number].needs, number}:
                taken.append((self._freed(stage, need, number), -nodes[need].size / self._unit))

    def _freed(self, stage: int, number: int, by: int) -> int:
        """Return a variable that is 1 if a result is freed when a node has been computed."""
        freed = self._new(False)
        self._at_most([(freed, 1.0), (self._runs(stage, by), -1.0)], 0.0)
        self._at_most([(freed, 1.0), (self._kept.get((stage + 1, number)), 1.0)], 1.0)
        for user in itertools.takewhile(lambda one: one <= stage, self._graph.users[number]):
            if user > by:
                self._at_most([(freed, 1.0), (self._runs(stage, user), 1.0)], 1.0)
        return freed
