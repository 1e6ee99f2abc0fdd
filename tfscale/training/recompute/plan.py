"""Plans: what is computed again, with the memory that this saves and its cost."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tfscale.support import arguments
from tfscale.support.files import replacing
from tfscale.training.recompute.measure import measure
from tfscale.training.recompute.picture import Curve, draw, runs_of
from tfscale.training.recompute.results import Event, Results, has_same_results, ops_of
from tfscale.training.recompute.simulate import memory, moments_of
from tfscale.training.recompute.text import show
from tfscale.training.recompute.traced_step import ORIGINAL, Again, Piece, TracedStep

_log = logging.getLogger("tfscale")

# TensorFlow's allocator does not split a free piece of memory of less than twice the requested
# size, and wastes the rest. The waste stayed below this share of the memory in use in all
# measurements.
WASTED = 0.15

# What oneDNN keeps for a convolution and a size of batches: machine code, and descriptions of it.
KERNEL = 60_000


@dataclass(frozen=True)
class Plan:
    """A choice of units that are computed again. ``plan.summary()`` describes the choice.

    Args:
        step: the training step that was planned.
        segments: units that are computed again together, in order. A plan of single results has
            segments, too, for traces that have other results.
        budget: largest memory of the step in bytes, if it was given.
        pile_up: whether all gradients stay until the last one exists.
        proven: whether no cheaper choice exists in the solver's model.
        events: the results that are computed again, and when, if these are not whole segments.
        gap: largest share of the recomputation that a better plan could save, in the solver's
            model; None if it is unknown.
        rival: another plan, of segments, within the same budget; None if there is none.
    """

    step: TracedStep
    segments: tuple[range, ...]
    budget: float | None = None
    pile_up: bool = False
    proven: bool = False
    events: tuple[Event, ...] | None = None
    gap: float | None = None
    rival: Plan | None = None

    @property
    def phases(self) -> tuple[Plan, ...]:
        """The plans of all phases of the step: this one."""
        return (self,)

    @cached_property
    def results(self) -> Results:
        """The results of the step that can be computed again one by one."""
        return Results(self.step)

    @cached_property
    def again(self) -> tuple[Again, ...]:
        """The operations that are computed again together, sorted by time."""
        if self.events is not None:
            return self.results.again(self.events)
        return _again(self.step, map(self.step.ops_of, self.segments))

    def again_in(self, step: TracedStep, pieces: Sequence[Piece]) -> tuple[Again, ...]:
        """Return the operations to compute again in another trace of the model's step.

        Args:
            step: the other trace.
            pieces: its pieces of units.
        """
        if self.events is not None:
            results = Results(step)
            if has_same_results(self.step, step, pieces):
                return results.again(self.events)
            what = "fit traces the step with other operations than those of the plan"
            if not self.segments:
                raise RuntimeError(
                    f'{what}. Recompute(..., solver="segments") does not depend on them; it needs '
                    "a larger budget"
                )
            _log.warning("Recompute computes whole segments again, since %s", what)
        return _again(step, [ops_of(part, pieces) for part in self.parts])

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
        too, and oneDNN keeps its own memory.
        """
        largest = max(self.step.updated, default=0)
        size = expected + max(self.step.largest, largest) + 2 * largest
        wasted = math.ceil(WASTED * (size + sum(self.step.updated)))
        return size + wasted + KERNEL * self.step.convolutions

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
        return "\n".join([*_table(self), *_totals(self)])

    def draw(self) -> Any:
        """Plot the memory during a step, with and without the plan; return a matplotlib figure."""
        return draw([self._plain_curve, self._curve("planned", "C0")], self._shaded, self.budget)

    def compare(self) -> Any:
        """Plot the memory of a step without recomputation, with segments and with this plan.

        The legend says what the recomputation costs. Return a matplotlib figure.
        """
        curves = [self._plain_curve]
        if self.rival is not None:
            curves.append(self.rival._curve("segments", "C2", cost=True))
        how = "segments" if self.events is None else "single results"
        return draw([*curves, self._curve(how, "C0", cost=True)], self._shaded, self.budget)

    @property
    def _plain_curve(self) -> Curve:
        upto = [self.up_to(size) for size in self.plain_timeline]
        return Curve(f"plain: up to {show(self.plain_bound)}", upto, "0.6")

    def _curve(self, how: str, color: str, cost: bool = False) -> Curve:
        upto = [self.up_to(size) for size in self.timeline]
        more = f", {self.overhead:.1%} of the operations twice" if cost else ""
        return Curve(f"{how}: up to {show(self.bound)}{more}", upto, color)

    @property
    def _shaded(self) -> list[range]:
        return runs_of([one.version != ORIGINAL for one in moments_of(self.step, self.again)])

    def save(self, path: str | Path) -> None:
        """Write the plan into a file, for ``load_plan`` and ``Recompute(plan=...)``.

        Args:
            path: name of the file.
        """
        with replacing(Path(arguments.path(path, "path"))) as fresh:
            fresh.write_text(json.dumps(self.words()))

    def words(self) -> dict[str, Any]:
        """Return what ``save`` writes."""
        return {
            "budget": self.budget,
            "pile_up": self.pile_up,
            "plain_peak": self.plain_peak,
            "step": self.step.digest,
            "segments": [[segment.start, segment.stop] for segment in self.segments],
            "events": self.events and [[one.before, *one.nodes] for one in self.events],
            "proven": self.proven,
            "gap": self.gap,
        }


def _again(step: TracedStep, segments: Iterable[range]) -> tuple[Again, ...]:
    found = [one for one in map(step.again, segments) if one]
    return tuple(sorted(found, key=lambda one: one.before))


def _table(plan: Plan) -> list[str]:
    saved = measure(plan.step, plan.pile_up).saved
    again = _again_by_unit(plan)
    rows: list[tuple[str, float, str]] = []
    for number, unit in enumerate(plan.step.units):
        what = again.get(number, "kept")
        if rows and rows[-1][0] == unit.name and rows[-1][2] == what:
            rows[-1] = (unit.name, rows[-1][1] + saved[number], what)
        elif saved[number] or number in again:
            rows.append((unit.name, saved[number], what))
    width = max([len(name) for name, _, _ in rows] + [5])
    lines = [f"{'layer':{width}}  {'saves':>10}  plan"]
    return lines + [f"{name:{width}}  {show(size):>10}  {what}" for name, size, what in rows]


def _again_by_unit(plan: Plan) -> dict[int, str]:
    """Return how much of each unit is computed again, and when."""
    if plan.events is None:
        segments = enumerate(plan.segments, 1)
        return {unit: f"again, segment {number}" for number, seg in segments for unit in seg}
    cost: dict[int, float] = {}
    for one in plan.again:
        for op in one.ops:
            unit = plan.step.unit_of[op]
            cost[unit] = cost.get(unit, 0.0) + plan.step.ops[op].cost
    result = {}
    for number, more in cost.items():
        unit_ops = plan.step.ops_of(range(number, number + 1))
        whole = sum(plan.step.ops[op].cost for op in unit_ops)
        result[number] = f"again, {more / whole:.0%} of its operations" if whole else "again"
    return result


def _totals(plan: Plan) -> list[str]:
    what = "segments" if plan.events is None else "parts"
    lines = [
        f"a step takes up to {show(plan.bound)} of {show(plan.plain_bound)} "
        f"({plan.bound / plan.plain_bound:.0%}), beside variables",
        f"predicted overhead: {plan.overhead:.0%} of a step's operations, "
        f"in {len(plan.again)} {what}",
    ]
    if plan.budget is not None:
        how = "cheapest in the solver's model" if plan.proven else _how_good(plan)
        lines.append(f"budget: {show(plan.budget)}; {how}")
    return lines


def _how_good(plan: Plan) -> str:
    if plan.gap is None:
        return "not proven to be the cheapest"
    return f"a better plan could save at most {plan.gap:.0%} of the overhead in the solver's model"
