"""Plans: the layers that are computed again, with the memory that this saves and its cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tfscale.support import arguments, figures
from tfscale.training.recompute.measure import measure
from tfscale.training.recompute.simulate import memory, moments_of
from tfscale.training.recompute.solve import solve
from tfscale.training.recompute.traced_step import Again, TracedStep

# Number of halvings in the search for the solver's memory limit: the result is exact to 1/256.
ROUNDS = 8

# TensorFlow's allocator does not split a free piece of memory of less than twice the requested
# size, and wastes the rest. The waste stayed below this share of the memory in use in all
# measurements.
WASTED = 0.15

Tell = Callable[[int, int], None]  # takes the number of finished plans, and of all plans


class BudgetError(ValueError):
    """Raised if no plan keeps the step within the budget.

    Args:
        budget: the budget in bytes.
        smallest: the smallest budget that a plan keeps.
        plain: the smallest budget that needs no recomputation.
    """

    def __init__(self, budget: float, smallest: float, plain: float) -> None:
        super().__init__(
            f"the budget of {show(budget)} is too small: a step takes up to {show(plain)}, and "
            f"recomputation can reduce that to {show(smallest)}. Ask for at least "
            f"{show(smallest)} (fraction={_up(smallest / plain)}), or use smaller batches."
        )
        self.budget = budget
        self.smallest = smallest
        self.plain = plain

    def __reduce__(self) -> tuple[type[BudgetError], tuple[float, float, float]]:
        return type(self), (self.budget, self.smallest, self.plain)


@dataclass(frozen=True)
class Plan:
    """A choice of units that are computed again. ``plan.summary()`` describes the choice.

    Args:
        step: the training step that was planned.
        segments: units that are computed again together, in order.
        budget: largest memory of the step in bytes, if it was given.
        pile_up: whether all gradients stay until the last one exists.
        proven: whether no cheaper choice exists in the solver's model.
    """

    step: TracedStep
    segments: tuple[range, ...]
    budget: float | None = None
    pile_up: bool = False
    proven: bool = False

    @cached_property
    def again(self) -> tuple[Again, ...]:
        """The operations that each segment computes again."""
        each = (self.step.again(self.step.ops_of(segment)) for segment in self.segments)
        return tuple(one for one in each if one)

    @cached_property
    def timeline(self) -> list[int]:
        """Bytes in use while each operation runs."""
        return memory(self.step, self.again, self.pile_up)

    @cached_property
    def plain_timeline(self) -> list[int]:
        """Bytes in use while each operation runs, without recomputation."""
        return memory(self.step, (), self.pile_up)

    @property
    def pieces(self) -> int:
        """Number of pieces of all units together."""
        return self.step.units[-1].pieces.stop

    @property
    def parts(self) -> list[range]:
        """The segments in pieces of units, which are equal in every trace of the model."""
        units = self.step.units
        return [
            range(units[seg[0]].pieces.start, units[seg[-1]].pieces.stop) for seg in self.segments
        ]

    @property
    def peak(self) -> int:
        """Largest expected number of bytes of a step, without variables."""
        return max(self.timeline)

    @property
    def bound(self) -> int:
        """Upper bound of a step's memory, which a budget must cover."""
        return self.up_to(self.peak)

    @property
    def plain_bound(self) -> int:
        """Upper bound of a step's memory without recomputation."""
        return self.up_to(self.plain_peak)

    def up_to(self, expected: int) -> int:
        """Return an upper bound of the memory in use where so many bytes are expected.

        One more operation may run at the same time. The update of a weight may copy it, into a
        piece of memory that is up to twice as large. The allocator wastes a part of all memory,
        too.
        """
        largest = max(self.step.updated, default=0)
        size = expected + max(self.step.largest, largest) + 2 * largest
        return size + math.ceil(WASTED * (size + sum(self.step.updated)))

    @property
    def plain_peak(self) -> int:
        """The peak without recomputation."""
        return max(self.plain_timeline)

    @property
    def overhead(self) -> float:
        """Cost of the recomputation, as a share of the step's operations."""
        more = sum(self.step.ops[index].cost for one in self.again for index in one.ops)
        return more / self.step.cost if more else 0.0

    def summary(self) -> str:
        """Describe what is kept, what is computed again, and the expected memory and time."""
        return _summary(self)

    def draw(self) -> Any:
        """Plot the memory during a step, with and without the plan; return a matplotlib figure."""
        return _draw(self)


def _no_report(done: int, of: int) -> None:
    pass


def _check(step: TracedStep, pile_up: bool, tell: Tell = _no_report) -> None:
    arguments.instance(step, "step", TracedStep, "what tfscale.recompute.trace returns")
    arguments.flag(pile_up, "pile_up")
    arguments.function(tell, "tell", "a function of how many plans are made, and of how many")


def checked_fraction(fraction: float) -> float:
    """Return a share of a step's memory, or raise."""
    return arguments.real(fraction, "fraction", above=0, most=1, example="0.4")


def checked_layers(layers: Sequence[str]) -> tuple[str, ...]:
    """Return names of layers, or raise."""
    return arguments.items(layers, "layers", "a list of names of layers", arguments.text)


def plan_budget(
    step: TracedStep, budget: float, pile_up: bool = False, tell: Tell = _no_report
) -> Plan:
    """Return the cheapest plan whose step stays within a budget.

    Args:
        step: a step that ``trace`` returned.
        budget: largest memory of the step in bytes.
        pile_up: whether all gradients stay until the last one exists, as with clipping by their
            global norm.
        tell: is called now and then with the progress of a long search.

    Example:
        >>> from tfscale import recompute
        >>> step = recompute.trace(model, (tf.TensorSpec([64, 8]), tf.TensorSpec([64, 1])))
        >>> plan = recompute.plan_budget(step, 1e9)
    """
    arguments.real(budget, "budget", 0, what="a number of bytes")
    _check(step, pile_up, tell)
    _refuse_unknown_sizes(step)
    plain = Plan(step, (), budget, pile_up, proven=True)
    if plain.bound <= budget:
        return plain
    chain = measure(step, pile_up)

    def planned(limit: float) -> Plan | None:
        found = solve(chain, limit)
        if found is None:
            return None
        return Plan(step, found.segments, budget, pile_up, found.exact)

    candidates = _search(planned, plain.peak, lambda plan: plan.bound <= budget, tell)
    fitting = [plan for plan in candidates if plan.bound <= budget]
    if not fitting:
        smallest = min((plan.bound for plan in candidates), default=plain.bound)
        raise BudgetError(budget, smallest, plain.bound)
    return min(fitting, key=lambda plan: (plan.overhead, plan.peak))


def _refuse_unknown_sizes(step: TracedStep) -> None:
    if step.unknown:
        more = f" and {len(step.unknown) - 1} more" if len(step.unknown) > 1 else ""
        raise ValueError(
            f"no budget can be guaranteed: the size of the results of {step.unknown[0]!r}{more} "
            "depends on the data. If the reason is that lengths of batches vary, give the largest "
            "one: Recompute(..., example=(x, y)). Otherwise choose what to compute again, "
            'without a budget: Recompute(layers=[...]) or Recompute(segments="sqrt").'
        )


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


def plan_fraction(
    step: TracedStep, fraction: float, pile_up: bool = False, tell: Tell = _no_report
) -> Plan:
    """Return the cheapest plan within a share of the step's memory without a plan.

    Args:
        step: a step that ``trace`` returned.
        fraction: share of the bytes that the step takes without recomputation.
        pile_up: whether all gradients stay until the last one exists, as with clipping by their
            global norm.
        tell: is called now and then with the progress of a long search.

    Example:
        >>> from tfscale import recompute
        >>> step = recompute.trace(model, (tf.TensorSpec([64, 8]), tf.TensorSpec([64, 1])))
        >>> plan = recompute.plan_fraction(step, 1.0)
    """
    fraction = checked_fraction(fraction)
    _check(step, pile_up, tell)
    return plan_budget(step, fraction * Plan(step, (), pile_up=pile_up).bound, pile_up, tell)


def plan_layers(step: TracedStep, layers: Sequence[str], pile_up: bool = False) -> Plan:
    """Return a plan that computes these layers again, and no others; neighbours together.

    Args:
        step: a step that ``trace`` returned.
        layers: names of the layers.
        pile_up: whether all gradients stay until the last one exists, as with clipping by their
            global norm.

    Example:
        >>> from tfscale import recompute
        >>> step = recompute.trace(model, (tf.TensorSpec([64, 8]), tf.TensorSpec([64, 1])))
        >>> plan = recompute.plan_layers(step, [model.layers[0].name])
    """
    layers = checked_layers(layers)
    _check(step, pile_up)
    there = {name for unit in step.units for name in unit.layers}
    if missing := [name for name in layers if name not in there]:
        raise ValueError(
            f"layers={list(layers)!r}: the model runs no layer named {missing[0]!r}. "
            f"It runs {', '.join(sorted(there))}."
        )
    chosen = [bool(set(unit.layers) & set(layers)) for unit in step.units]
    return Plan(step, tuple(_runs(chosen)), pile_up=pile_up)


def _runs(chosen: Sequence[bool]) -> list[range]:
    edges = [i for i in range(len(chosen) + 1) if _at(chosen, i) != _at(chosen, i - 1)]
    return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _at(chosen: Sequence[bool], index: int) -> bool:
    return 0 <= index < len(chosen) and chosen[index]


def plan_sqrt(step: TracedStep, pile_up: bool = False) -> Plan:
    """Return a plan of about sqrt(n) segments of n units that save about equal amounts.

    The last segment is kept.

    Args:
        step: a step that ``trace`` returned.
        pile_up: whether all gradients stay until the last one exists, as with clipping by their
            global norm.

    Example:
        >>> from tfscale import recompute
        >>> step = recompute.trace(model, (tf.TensorSpec([64, 8]), tf.TensorSpec([64, 1])))
        >>> plan = recompute.plan_sqrt(step)
    """
    _check(step, pile_up)
    saved = measure(step, pile_up).saved
    parts = max(2, round(math.sqrt(sum(saved > 0))))
    total = saved.cumsum()
    part = [min(int(parts * before / total[-1]), parts - 1) for before in total - saved]
    borders = [part.index(number) for number in range(parts) if number in part]
    segments = tuple(range(a, b) for a, b in itertools.pairwise(borders))
    return Plan(step, segments, pile_up=pile_up)


# # ------------------------------------------------------------ summary and plot


def show(size: float) -> str:
    """Return a number of bytes for people."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{size:.0f} bytes"


def _up(share: float) -> str:
    return f"{math.ceil(share * 100) / 100:.2f}"


def _summary(plan: Plan) -> str:
    return "\n".join([*_table(plan), *_totals(plan)])


def _table(plan: Plan) -> list[str]:
    saved = measure(plan.step, plan.pile_up).saved
    segment_of = {unit: number for number, seg in enumerate(plan.segments, 1) for unit in seg}
    rows: list[tuple[str, float, str]] = []
    for number, unit in enumerate(plan.step.units):
        what = f"again, segment {segment_of[number]}" if number in segment_of else "kept"
        if rows and rows[-1][0] == unit.name and rows[-1][2] == what:
            rows[-1] = (unit.name, rows[-1][1] + saved[number], what)
        elif saved[number] or number in segment_of:
            rows.append((unit.name, saved[number], what))
    width = max([len(name) for name, _, _ in rows] + [5])
    lines = [f"{'layer':{width}}  {'saves':>10}  plan"]
    return lines + [f"{name:{width}}  {show(size):>10}  {what}" for name, size, what in rows]


def _totals(plan: Plan) -> list[str]:
    lines = [
        f"a step takes up to {show(plan.bound)} of {show(plan.plain_bound)} "
        f"({plan.bound / plan.plain_bound:.0%}), beside variables",
        f"predicted overhead: {plan.overhead:.0%} of a step's operations, "
        f"in {len(plan.again)} segments",
    ]
    if plan.budget is not None:
        how = "cheapest in the solver's model" if plan.proven else "not proven to be the cheapest"
        lines.append(f"budget: {show(plan.budget)}; {how}")
    return lines


def _draw(plan: Plan) -> Any:
    figure = figures.figure(9, 4)
    axes = figure.add_subplot()
    for how, timeline, most, color in (
        ("plain", plan.plain_timeline, plan.plain_bound, "0.6"),
        ("planned", plan.timeline, plan.bound, "C0"),
    ):
        upto = [plan.up_to(size) / 1e6 for size in timeline]
        axes.plot(upto, color=color, label=f"{how}: up to {show(most)}")
    moments = list(moments_of(plan.step, plan.again))
    recomputing = [moment.segment >= 0 for moment in moments]
    for run in _runs(recomputing):
        axes.axvspan(run.start, run.stop, color="C1", alpha=0.3, linewidth=0)
    if plan.budget is not None and plan.budget < plan.plain_bound:
        label = f"budget: {show(plan.budget)}"
        axes.axhline(plan.budget / 1e6, color="C3", linestyle=":", label=label)
    elif plan.budget is not None:  # a line far above would flatten the rest
        axes.plot([], linestyle="", label=f"budget: {show(plan.budget)}, more than plain takes")
    axes.set_xlabel("operations of one step (shaded: computed again)")
    axes.set_ylabel("MB beside variables")
    axes.legend(loc="upper right")
    return figure
