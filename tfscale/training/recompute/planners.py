"""Plans that need no search: segments of equal size, chosen layers, and plans from files."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tfscale.support import arguments
from tfscale.training.recompute.measure import measure
from tfscale.training.recompute.phases import PhasedPlan, for_each
from tfscale.training.recompute.picture import runs_of
from tfscale.training.recompute.plan import Plan
from tfscale.training.recompute.results import Event
from tfscale.training.recompute.text import show
from tfscale.training.recompute.traced_step import Phases, TracedStep

_TRACED = "what tfscale.recompute.trace returns"


def check_step(step: TracedStep | Phases, pile_up: bool) -> None:
    """Raise if these are not a traced step and a flag."""
    arguments.instance(step, "step", (TracedStep, Phases), _TRACED)
    arguments.flag(pile_up, "pile_up")


def checked_layers(layers: Sequence[str]) -> tuple[str, ...]:
    """Return names of layers, or raise."""
    return arguments.items(layers, "layers", "a list of names of layers", arguments.text)


def plan_layers(
    step: TracedStep | Phases, layers: Sequence[str], pile_up: bool = False
) -> Plan | PhasedPlan:
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
    check_step(step, pile_up)
    there = {name for one in step.steps for unit in one.units for name in unit.layers}
    if missing := [name for name in layers if name not in there]:
        raise ValueError(
            f"layers={list(layers)!r}: the model runs no layer named {missing[0]!r}. "
            f"It runs {', '.join(sorted(there))}."
        )

    def planned(one: TracedStep) -> Plan:
        chosen = [bool(set(unit.layers) & set(layers)) for unit in one.units]
        return Plan(one, tuple(runs_of(chosen)), pile_up=pile_up)

    return for_each(step, planned)


def plan_sqrt(step: TracedStep | Phases, pile_up: bool = False) -> Plan | PhasedPlan:
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
    check_step(step, pile_up)
    return for_each(step, lambda one: _sqrt(one, pile_up))


def _sqrt(step: TracedStep, pile_up: bool) -> Plan:
    saved = measure(step, pile_up).saved
    parts = max(2, round(math.sqrt(sum(saved > 0))))
    total = saved.cumsum()
    part = [min(int(parts * before / total[-1]), parts - 1) for before in total - saved]
    borders = [part.index(number) for number in range(parts) if number in part]
    segments = tuple(range(a, b) for a, b in itertools.pairwise(borders))
    return Plan(step, segments, pile_up=pile_up)


def load_plan(path: str | Path, step: TracedStep | Phases) -> Plan | PhasedPlan:
    """Return a plan that ``plan.save`` wrote, or raise if it is not of this step.

    Args:
        path: name of the file.
        step: a step that ``trace`` returned.

    Example:
        >>> from tfscale import recompute
        >>> step = recompute.trace(model, (tf.TensorSpec([64, 8]), tf.TensorSpec([64, 1])))
        >>> recompute.plan_sqrt(step).save("plan.json")
        >>> plan = recompute.load_plan("plan.json", step)
    """
    path = Path(arguments.path(path, "path"))
    arguments.instance(step, "step", (TracedStep, Phases), _TRACED)
    steps = step.steps
    try:
        words = json.loads(path.read_text())
        each = words.get("phases", [words])
        plans = tuple(_of_words(one, phase) for one, phase in zip(steps, each))
        made_for = [(one["plain_peak"], one["step"]) for one in each]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no plan that plan.save wrote: {error!r}") from error
    found = [(plan.plain_peak, plan.step.digest) for plan in plans]
    if found != made_for or len(plans) != len(steps):
        raise ValueError(
            f"{path} has a plan of a step {_in_words(made_for)}, and this is a step "
            f"{_in_words(found)}: plan again for this model and batch"
        )
    return PhasedPlan(plans) if isinstance(step, Phases) else plans[0]


def _of_words(step: TracedStep, words: dict[str, Any]) -> Plan:
    events, segments = words["events"], words["segments"]
    return Plan(
        step,
        tuple(range(start, stop) for start, stop in segments),
        words["budget"],
        words["pile_up"],
        words["proven"],
        events and tuple(Event(first, tuple(nodes)) for first, *nodes in events),
        words["gap"],
    )


def _in_words(steps: Iterable[tuple[float, str]]) -> str:
    each = [f"{show(peak)} without it (operations {digest})" for peak, digest in steps]
    return "that takes " + " and then ".join(each)
