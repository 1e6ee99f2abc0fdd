"""Plans within a budget: segments first, and then single results, wherever that is cheaper."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

from tfscale.support import arguments
from tfscale.training.recompute.graph import Graph, Order, peak
from tfscale.training.recompute.levels import Levels, order_of
from tfscale.training.recompute.measure import measure
from tfscale.training.recompute.optimum import SOLVERS as SOLVERS_OF_ORDERS, Optimum, optimum
from tfscale.training.recompute.phases import PhasedPlan
from tfscale.training.recompute.plan import WASTED, Plan
from tfscale.training.recompute.planners import check_step
from tfscale.training.recompute.search import Search
from tfscale.training.recompute.solve import solve
from tfscale.training.recompute.text import rounded_up, show
from tfscale.training.recompute.traced_step import Phases, TracedStep

_log = logging.getLogger("tfscale")

SOLVERS = (*SOLVERS_OF_ORDERS, "segments")

# Number of halvings in the search for the solver's memory limit: the result is exact to 1/256.
ROUNDS = 8

# Recomputation up to this share of a step's operations is about one and a half forward passes.
MODERATE = 0.5

# Number of limits that the search for single results tries.
TRIES = 4

Tell = Callable[[int, int], None]  # takes the number of finished plans, and of all plans
Better = Callable[[float], None]  # takes the overhead of the best plan so far


class BudgetError(ValueError):
    """Raised if no plan keeps the step within the budget.

    Args:
        budget: the budget in bytes.
        smallest: the smallest budget that a plan keeps.
        plain: the smallest budget that needs no recomputation.
        moderate: the smallest budget that a plan keeps whose recomputation takes at most half a
            step's operations; by default ``smallest``.
    """

    def __init__(
        self, budget: float, smallest: float, plain: float, moderate: float | None = None
    ) -> None:
        moderate = smallest if moderate is None else moderate
        super().__init__(
            f"the budget of {show(budget)} is too small: a step takes up to "
            f"{show(plain, math.ceil)}, and {_can_reduce(plain, moderate, smallest)}, or use "
            "smaller batches."
        )
        self.budget = budget
        self.smallest = smallest
        self.plain = plain
        self.moderate = moderate

    def __reduce__(self) -> tuple[type[BudgetError], tuple[float, float, float, float]]:
        return type(self), (self.budget, self.smallest, self.plain, self.moderate)


def _can_reduce(plain: float, moderate: float, smallest: float) -> str:
    least = show(moderate, math.ceil)
    reduced = "cannot reduce that"
    if least != show(plain, math.ceil):
        reduced = f"can reduce that to {least}"
    words = f"moderate recomputation {reduced}. Ask for at least {_asked_for(moderate, plain)}"
    if rounded_up(smallest / plain) < rounded_up(moderate / plain):
        less = _asked_for(smallest, plain)
        words += f"; {less} is possible, too, but takes several times as long"
    return words


def _asked_for(budget: float, plain: float) -> str:
    return f"{show(budget, math.ceil)} (fraction={rounded_up(budget / plain)})"


def _no_report(done: int, of: int) -> None:
    pass


def _no_better(overhead: float) -> None:
    pass


class Effort(NamedTuple):
    """The effort that a search for a plan makes.

    Args:
        solver: the solver.
        seconds: time limit of the solver.
        tell: is called with the progress of the search for segments.
        better: is called with the overhead of each better plan of single results.
    """

    solver: str = "auto"
    seconds: float = 10.0
    tell: Tell = _no_report
    better: Better = _no_better


def plan_budget(
    step: TracedStep | Phases,
    budget: float,
    pile_up: bool = False,
    tell: Tell = _no_report,
    *,
    solver: str = "auto",
    seconds: float = 10.0,
    better: Better = _no_better,
) -> Plan | PhasedPlan:
    """Return the cheapest plan whose step stays within a budget.

    Args:
        step: a step that ``trace`` returned.
        budget: largest memory of the step in bytes.
        pile_up: whether all gradients stay until the last one exists, as with clipping by their
            global norm.
        tell: is called now and then with the progress of a long search.
        solver: "auto" also tries to compute single results again, any number of times, and never
            returns a more expensive plan than "segments", which computes whole segments of layers
            again, at most once. "search", "exact", "integer" and "rounded" are its solvers.
        seconds: time limit for single results, about.
        better: is called with the overhead of each better plan of single results.

    Example:
        >>> from tfscale import recompute
        >>> step = recompute.trace(model, (tf.TensorSpec([64, 8]), tf.TensorSpec([64, 1])))
        >>> plan = recompute.plan_budget(step, 1e9)
    """
    arguments.real(budget, "budget", 0, what="a number of bytes")
    check_step(step, pile_up)
    effort = checked_effort(solver, seconds, tell, better)
    if isinstance(step, Phases):
        return _phases_within(step, budget, pile_up, effort)
    return _within(step, budget, pile_up, effort)


def _phases_within(step: Phases, budget: float, pile_up: bool, effort: Effort) -> PhasedPlan:
    effort = effort._replace(seconds=effort.seconds / len(step.steps))
    plans, refusals = [], []
    for one in step.steps:
        try:
            plans.append(_within(one, budget, pile_up, effort))
        except BudgetError as refusal:
            refusals.append(refusal)
    if refusals:
        smallest = max(refusal.smallest for refusal in refusals)
        moderate = max(refusal.moderate for refusal in refusals)
        raise BudgetError(budget, smallest, _plain_bound(step, pile_up), moderate)
    return PhasedPlan(tuple(plans))


def _within(step: TracedStep, budget: float, pile_up: bool, effort: Effort) -> Plan:
    _refuse_unknown_sizes(step)
    plain = Plan(step, (), budget, pile_up, proven=True)
    if plain.bound <= budget:
        return plain
    candidates = _of_segments(plain, effort)
    rival = _cheapest(candidates, budget)
    if effort.solver != "segments" and _can_be_followed(step):
        candidates += _of_results(plain, rival, effort)
    best = _cheapest(candidates, budget)
    if best is None:
        raise _refusal(candidates, plain, budget)
    if best is rival or rival is None:
        return best
    return dataclasses.replace(best, segments=rival.segments, rival=rival)


def _refusal(candidates: list[Plan], plain: Plan, budget: float) -> BudgetError:
    candidates = [*candidates, plain]
    smallest = min(plan.bound for plan in candidates)
    moderate = min(plan.bound for plan in candidates if plan.overhead <= MODERATE)
    return BudgetError(budget, smallest, plain.bound, moderate)


def checked_effort(solver: str, seconds: float, tell: Tell, better: Better) -> Effort:
    """Return the effort of a search, or raise."""
    arguments.choice(solver, "solver", SOLVERS)
    arguments.real(seconds, "seconds", above=0, example="10")
    arguments.function(tell, "tell", "a function of how many plans are made, and of how many")
    arguments.function(better, "better", "a function of a plan's overhead")
    return Effort(solver, seconds, tell, better)


def _cheapest(plans: list[Plan], budget: float) -> Plan | None:
    fitting = [plan for plan in plans if plan.bound <= budget]
    return min(fitting, key=lambda plan: (plan.overhead, plan.peak), default=None)


def _can_be_followed(step: TracedStep) -> bool:
    if not step.followed:
        _log.warning(
            "Recompute chooses among whole segments of layers only: fit does not know the size of "
            "a batch, and then traces other operations than for the known size. Batches of one "
            "size (drop_remainder=True) avoid that"
        )
    return step.followed


def _refuse_unknown_sizes(step: TracedStep) -> None:
    if step.unknown:
        more = f" and {len(step.unknown) - 1} more" if len(step.unknown) > 1 else ""
        raise ValueError(
            f"no budget can be guaranteed: the size of the results of {step.unknown[0]!r}{more} "
            "depends on the data. If the reason is that lengths of batches vary, give the largest "
            "one: Recompute(..., example=(x, y)). Otherwise choose what to compute again, "
            'without a budget: Recompute(layers=[...]) or Recompute(segments="sqrt").'
        )


# -------------------------------------------------------------------- segments


def _of_segments(plain: Plan, effort: Effort) -> list[Plan]:
    budget = plain.budget or 0.0
    chain = measure(plain.step, plain.pile_up)

    def planned(limit: float) -> Plan | None:
        found = solve(chain, limit)
        if found is None:
            return None
        return dataclasses.replace(plain, segments=found.segments, proven=found.exact)

    return _search(planned, plain.peak, lambda plan: plan.bound <= budget, effort.tell)


def _search(
    planned: Callable[[float], Plan | None],
    plain: float,
    fits: Callable[[Plan], bool],
    tell: Tell,
) -> list[Plan]:
    """Return plans around the largest limit whose plan fits.

    The solver's model of memory is slightly coarser than the simulation's, so the search finds the
    limit for the solver. If nothing fits, the result has plans down to the smallest.
    """
    found = []
    low, high = 0.0, float(plain)
    for done in range(ROUNDS):
        tell(done, ROUNDS)
        middle = (low + high) / 2
        plan = planned(middle)
        if plan is not None:
            found.append(plan)
        if plan is None or fits(plan):
            low = middle
        else:
            high = middle
    return found


# -------------------------------------------------------------- single results


def _of_results(plain: Plan, rival: Plan | None, effort: Effort) -> list[Plan]:
    """Return plans that compute single results again.

    The graph's memory is a little coarser than the simulation of all operations, so the search
    corrects the limit for the solver. If no plan at a moderate cost fits, it ends with the smallest
    plans, which are those that a refusal promises.
    """
    graph = plain.results.graph(plain.pile_up)
    starts = () if rival is None else (plain.results.order(rival.again),)
    budget = plain.budget or 0.0
    limit = most = _expected(plain, budget)
    found: list[Plan] = []
    for _ in range(TRIES):
        best = _solved(graph, limit, effort, starts, plain)
        if best is None:
            break
        found.append(_planned(plain, best))
        before, limit = limit, most - (found[-1].peak - peak(graph, best.order))
        if best.interrupted or (found[-1].bound <= budget and limit < 1.01 * before):
            break
    rivals = [] if rival is None else [rival]
    cheapest = _cheapest([*found, *rivals], budget)
    if cheapest is None or cheapest.overhead > MODERATE:
        found += _smallest(plain, graph, effort)
    return found


def _expected(plain: Plan, budget: float) -> float:
    """Return the expected peak whose upper bound is a budget."""
    nothing = plain.up_to(0)
    return (budget - nothing) / (1 + WASTED)


def _solved(
    graph: Graph, limit: float, effort: Effort, starts: tuple[tuple[int, ...], ...], plain: Plan
) -> Optimum | None:
    cost = plain.step.cost or 1.0
    return optimum(
        graph,
        limit,
        solver=effort.solver,
        seconds=effort.seconds / TRIES,
        starts=starts,
        tell=lambda best: effort.better(best.cost / cost),
    )


def _planned(plain: Plan, best: Optimum) -> Plan:
    return dataclasses.replace(_follow(plain, best.order), proven=best.gap == 0, gap=best.gap)


def _smallest(plain: Plan, graph: Graph, effort: Effort) -> list[Plan]:
    """Return plans down to the smallest limit that the search can keep.

    A refusal names the smallest budget, and a user who then asks for it must get it. So the result
    does not depend on the machine's speed, unless the time is over.
    """
    low = max(graph.working_set(number) for number in range(len(graph.nodes)))
    high = peak(graph, graph.plain)
    found: list[tuple[Plan, Levels]] = []
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        levels = Search(graph, middle, effort.seconds / TRIES, _no_order).fitting()
        if levels is None:
            low = middle
        else:
            order = order_of(graph, levels)
            high = min(middle, peak(graph, order))
            found.append((_follow(plain, order), levels))
    plans = [plan for plan, _ in found]
    fitting = _cheapest(plans, plain.budget or 0.0)
    better = (_improved(graph, *one, effort) for one in found if one[0] is fitting)
    return [*plans, *better]


def _improved(graph: Graph, plan: Plan, levels: Levels, effort: Effort) -> Plan:
    """Return a plan that is not more expensive, and takes no more memory."""
    limit = peak(graph, order_of(graph, levels))
    order = Search(graph, limit, effort.seconds / TRIES, _no_order).run(levels=levels)
    return plan if order is None else _follow(plan, order)


def _follow(plain: Plan, order: Order) -> Plan:
    return dataclasses.replace(plain, events=plain.results.events(order), proven=False)


def _no_order(order: Order) -> None:
    pass


# -------------------------------------------------------------------- fractions


def checked_fraction(fraction: float) -> float:
    """Return a share of a step's memory, or raise."""
    return arguments.real(fraction, "fraction", above=0, most=1, example="0.4")


def plan_fraction(
    step: TracedStep | Phases,
    fraction: float,
    pile_up: bool = False,
    tell: Tell = _no_report,
    *,
    solver: str = "auto",
    seconds: float = 10.0,
    better: Better = _no_better,
) -> Plan | PhasedPlan:
    """Return the cheapest plan within a share of the step's memory without a plan.

    Args:
        step: a step that ``trace`` returned.
        fraction: share of the bytes that the step takes without recomputation.
        pile_up: whether all gradients stay until the last one exists, as with clipping by their
            global norm.
        tell: is called now and then with the progress of a long search.
        solver: the solver, as for ``plan_budget``.
        seconds: time limit for single results, about.
        better: is called with the overhead of each better plan of single results.

    Example:
        >>> from tfscale import recompute
        >>> step = recompute.trace(model, (tf.TensorSpec([64, 8]), tf.TensorSpec([64, 1])))
        >>> plan = recompute.plan_fraction(step, 1.0)
    """
    fraction = checked_fraction(fraction)
    check_step(step, pile_up)
    budget = fraction * _plain_bound(step, pile_up)
    return plan_budget(step, budget, pile_up, tell, solver=solver, seconds=seconds, better=better)


def _plain_bound(step: TracedStep | Phases, pile_up: bool) -> int:
    return max(Plan(one, (), pile_up=pile_up).bound for one in step.steps)
