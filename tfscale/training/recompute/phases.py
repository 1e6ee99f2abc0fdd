"""Plans of training steps that apply gradients several times, such as those of a GAN.

Each phase has a plan of its own. The phases run one after the other, so the step takes as much
memory as the largest phase.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfscale.support import arguments
from tfscale.support.files import replacing
from tfscale.training.recompute.picture import Curve, draw
from tfscale.training.recompute.plan import Plan
from tfscale.training.recompute.text import show
from tfscale.training.recompute.traced_step import Again, Phases, TracedStep


@dataclass(frozen=True)
class PhasedPlan:
    """The plans of all phases of a training step. ``plan.summary()`` describes them.

    Args:
        phases: the plan of each phase.
    """

    phases: tuple[Plan, ...]

    @property
    def budget(self) -> float | None:
        """Largest memory of the step in bytes, if it was given."""
        return self.phases[0].budget

    @property
    def pile_up(self) -> bool:
        """Whether all gradients of a phase stay until the last one exists."""
        return self.phases[0].pile_up

    @property
    def again(self) -> tuple[Again, ...]:
        """The operations that are computed again together, phase by phase."""
        return tuple(one for plan in self.phases for one in plan.again)

    @property
    def peak(self) -> int:
        """Largest expected number of bytes of a step, without variables."""
        return max(plan.peak for plan in self.phases)

    @property
    def plain_peak(self) -> int:
        """The peak without recomputation."""
        return max(plan.plain_peak for plan in self.phases)

    @property
    def bound(self) -> int:
        """Upper bound of a step's memory, which a budget must cover."""
        return max(plan.bound for plan in self.phases)

    @property
    def plain_bound(self) -> int:
        """Upper bound of a step's memory without recomputation."""
        return max(plan.plain_bound for plan in self.phases)

    @property
    def overhead(self) -> float:
        """Cost of the recomputation, as a share of the step's operations."""
        more = sum(plan.overhead * plan.step.cost for plan in self.phases)
        return more / sum(plan.step.cost for plan in self.phases) if more else 0.0

    def summary(self) -> str:
        """Describe the plan of each phase, and the expected memory and time of the step."""
        count = len(self.phases)
        lines = [
            f"phase {number} of {count}:\n{plan.summary()}"
            for number, plan in enumerate(self.phases, 1)
        ]
        lines.append(
            f"all {count} phases: a step takes up to {show(self.bound)} of "
            f"{show(self.plain_bound)} ({self.bound / self.plain_bound:.0%}), beside variables; "
            f"predicted overhead: {self.overhead:.0%} of a step's operations"
        )
        return "\n".join(lines)

    def draw(self) -> Any:
        """Plot the memory during a step, with and without the plan; return a matplotlib figure."""
        plain = Curve(f"plain: up to {show(self.plain_bound)}", self._joined(_plain), "0.6")
        planned = Curve(
            f"planned: up to {show(self.bound)}, {self.overhead:.1%} of the operations twice",
            self._joined(_planned),
            "C0",
        )
        return draw([plain, planned], [], self.budget)

    compare = draw

    def _joined(self, timeline: Callable[[Plan], Sequence[float]]) -> list[float]:
        return list(itertools.chain.from_iterable(map(timeline, self.phases)))

    def save(self, path: str | Path) -> None:
        """Write the plan into a file, for ``load_plan`` and ``Recompute(plan=...)``.

        Args:
            path: name of the file.
        """
        words = {"phases": [plan.words() for plan in self.phases]}
        with replacing(Path(arguments.path(path, "path"))) as fresh:
            fresh.write_text(json.dumps(words))


def _plain(plan: Plan) -> list[float]:
    return [plan.up_to(size) for size in plan.plain_timeline[plan.step.begin :]]


def _planned(plan: Plan) -> list[float]:
    return [plan.up_to(size) for size in plan.timeline[plan.step.begin :]]


def for_each(step: TracedStep | Phases, planned: Callable[[TracedStep], Plan]) -> Plan | PhasedPlan:
    """Return a step's plan; of several phases, the plans of all of them."""
    if isinstance(step, Phases):
        return PhasedPlan(tuple(map(planned, step.steps)))
    return planned(step)
