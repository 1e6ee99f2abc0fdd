"""The choice between solvers: which order of a graph is the cheapest within a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tfscale.support import arguments
from tfscale.training.recompute.bound import lower_bound
from tfscale.training.recompute.exact import MOST_NODES, exact
from tfscale.training.recompute.graph import Graph, Order, check, more_cost, peak
from tfscale.training.recompute.integer import NoSciPy, solve_integer, variables
from tfscale.training.recompute.search import Search

SOLVERS = ("auto", "exact", "integer", "rounded", "search")
# With more variables, the integer program rarely improves the result of the search in minutes.
MOST_VARIABLES = 40_000


@dataclass(frozen=True)
class Optimum:
    """The cheapest order that was found.

    Args:
        order: the order.
        cost: cost of its recomputation.
        bound: cost that no order within the budget can be below.
        interrupted: whether Ctrl-C ended the search.
    """

    order: Order
    cost: float
    bound: float
    interrupted: bool = False

    @property
    def gap(self) -> float:
        """Largest share of the recomputation that a better order could save."""
        return max(0.0, 1 - self.bound / self.cost) if self.cost > 0 else 0.0


Tell = Callable[[Optimum], None]  # takes the best order so far


def _no_report(best: Optimum) -> None:
    pass


def optimum(
    graph: Graph,
    budget: float,
    *,
    solver: str = "auto",
    seconds: float = 10.0,
    starts: Sequence[Order] = (),
    tell: Tell = _no_report,
) -> Optimum | None:
    """Return the cheapest order within a budget that a solver finds; None if it finds none.

    The result is never more expensive than a given order that fits. Ctrl-C ends the search, and
    the best order so far is the result.

    Args:
        graph: the graph.
        budget: most bytes that an order may take.
        solver: "exact" is Dijkstra's algorithm, "integer" Checkmate's integer program, "rounded"
            the same with fractions that are rounded, "search" a local search. "auto" takes "exact"
            for a few nodes, and otherwise "search" before "integer".
        seconds: time limit, except for "exact".
        starts: known orders, such as those of segments.
        tell: is called with each better order.
    """
    arguments.choice(solver, "solver", SOLVERS)
    return _Solving(graph, budget, seconds, tell).run(solver, starts)


class _Solving:
    def __init__(self, graph: Graph, budget: float, seconds: float, tell: Tell) -> None:
        self._graph = graph
        self._budget = budget
        self._seconds = seconds
        self._tell = tell
        self._best: Optimum | None = None
        self._bound = lower_bound(graph, budget)

    def run(self, solver: str, starts: Sequence[Order]) -> Optimum | None:
        if self._bound == float("inf"):
            return None
        try:
            for order in [self._graph.plain, *starts]:
                self._offer(order)
            self._run(solver, starts)
        except KeyboardInterrupt:
            if self._best is None:
                raise
            self._best = replace(self._best, interrupted=True)
        return self._best

    def _run(self, solver: str, starts: Sequence[Order]) -> None:
        if self._is_proven():
            return
        if solver == "exact" or (solver == "auto" and len(self._graph.nodes) <= MOST_NODES):
            self._exact()
        elif solver in ("integer", "rounded"):
            self._integer(relaxed=solver == "rounded")
        elif solver == "auto" and variables(self._graph) <= MOST_VARIABLES:
            self._seconds /= 2
            self._search(starts)
            self._integer_if_possible()
        else:
            self._search(starts)

    def _is_proven(self) -> bool:
        return self._best is not None and self._best.gap == 0

    def _exact(self) -> None:
        order = exact(self._graph, self._budget)
        if order is not None:
            self._bound = more_cost(self._graph, order)
            self._offer(order)

    def _search(self, starts: Sequence[Order]) -> None:
        Search(self._graph, self._budget, self._seconds, self._offer).run(starts)

    def _integer_if_possible(self) -> None:
        if not self._is_proven():
            with contextlib.suppress(NoSciPy):
                self._integer(relaxed=False)

    def _integer(self, relaxed: bool) -> None:
        most = self._best.cost if self._best else float("inf")
        solved = solve_integer(self._graph, self._budget, self._seconds, most, relaxed)
        # No order below the best one: it is the cheapest.
        self._bound = max(self._bound, min(solved.bound, most))
        if solved.order is not None and not (relaxed and self._best):
            self._offer(solved.order)
        self._renew()

    def _offer(self, order: Order) -> None:
        """Take an order if it fits and is cheaper than the best one so far."""
        cost = more_cost(self._graph, order)
        if self._best is not None and cost >= self._best.cost:
            return
        check(self._graph, order)
        if peak(self._graph, order) <= self._budget:
            self._best = Optimum(order, cost, min(self._bound, cost))
            self._tell(self._best)

    def _renew(self) -> None:
        if self._best is not None:
            self._best = Optimum(
                self._best.order, self._best.cost, min(self._bound, self._best.cost)
            )
