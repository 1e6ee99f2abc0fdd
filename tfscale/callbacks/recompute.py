"""A callback that saves memory: the backward pass computes parts of the forward pass again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from tfscale.bridge.grappler import sums_in_order
from tfscale.bridge.installed import refuse_keras_2
from tfscale.bridge.objects import innermost, optimizers_of
from tfscale.callbacks.one_fit import OneFit
from tfscale.native import memory
from tfscale.support import arguments
from tfscale.support.sizes import number_of_bytes
from tfscale.training.optimizers import AdaHessian
from tfscale.training.recompute import (
    PhasedPlan,
    Plan,
    load_plan,
    plan_budget,
    plan_fraction,
    plan_layers,
    plan_sqrt,
    recomputing,
    trace,
)
from tfscale.training.recompute.batch import batch_of_fit, open_batch_of_fit
from tfscale.training.recompute.budget import Effort, checked_effort, checked_fraction
from tfscale.training.recompute.planners import checked_layers
from tfscale.training.recompute.traced_step import Phases, TracedStep

SECONDS_BETWEEN_LINES = 2  # seconds between two messages of a search


class Recompute(keras.callbacks.Callback):
    """A callback that frees activations, and computes them again in the backward pass.

    A step keeps the results of all layers until the backward pass has used them, so its memory
    grows with the depth n of the model. With k recomputed segments, only their borders and one
    segment at a time stay in memory: about k + n/k layers instead of n, 2 sqrt(n) at best, for at
    most one more forward pass [1].

    The training is bitwise the same. The operations of the backward pass use copies of the forward
    pass's operations instead of their results: random numbers come from the same seeds, and
    statistics are updated once.

    Before training, the callback derives from the step's graph, for the real batch, the memory and
    the cost of each layer. With ``budget`` or ``fraction`` it then searches for the cheapest plan
    within the limit: any result may be computed again, any number of times [2]. Ctrl-C ends the
    search, and the best plan so far is taken. The callback prints ``plan.summary()``.

    Memory here is the memory of a step of one replica, without variables (weights, optimizer
    state). Replicas that share a device add up.

    Args:
        budget: largest memory of a step in bytes: a number, "2GB" (of 1000 MB) or "800MiB".
        fraction: largest memory of a step, as a share of its memory without this callback.
        layers: names of layers to compute again; neighbours are computed together.
        segments: "sqrt": about sqrt(n) segments of equal size, the last of which is kept.
        plan: file that ``plan.save`` wrote for this model and batch.
        solver: "auto" tries several solvers, and its plan is never more expensive than that of
            "segments", which computes whole segments of layers again. "search", "exact",
            "integer" and "rounded" are the single solvers.
        seconds: time limit of the search with ``budget`` or ``fraction``, about.
        example: a batch as ``fit`` gives it to a step, for example ``(x, y)``. Only its shapes
            count. Needed if they are unknown: generators, lengths that vary.
        verbose: 0 prints nothing.

    Example:
        >>> history = model.fit(x, y, verbose=0, callbacks=[Recompute(fraction=0.9, verbose=0)])

    Reference:
        [1] Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost.
        https://arxiv.org/abs/1604.06174

        [2] Jain et al.: Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization.
        https://arxiv.org/abs/1910.02653
    """

    def __init__(
        self,
        *,
        budget: float | str | None = None,
        fraction: float | None = None,
        layers: Sequence[str] | None = None,
        segments: str | None = None,
        plan: str | Path | None = None,
        solver: str = "auto",
        seconds: float = 10.0,
        example: Any = None,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        refuse_keras_2("Recompute watches layers of Keras 3")
        given = {
            "budget": budget,
            "fraction": fraction,
            "layers": layers,
            "segments": segments,
            "plan": plan,
        }
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            got = ", ".join(f"{name}={arguments.shown(value)}" for name, value in given.items())
            raise ValueError(
                "Recompute takes exactly one of budget, fraction, layers, segments and plan, such "
                f"as Recompute(fraction=0.4); got {got}"
            )
        name, value = named[0], given[named[0]]
        self._choose = _CHOICES[name](value)
        self._effort = checked_effort(solver, seconds, self._tell_progress, self._tell_better)
        self._last_line = time.monotonic()
        arguments.optional(arguments.data, example, "example")
        arguments.whole(int(verbose) if isinstance(verbose, bool) else verbose, "verbose", 0, 2)
        self._example = example
        self._verbose = verbose
        self._plan: Plan | PhasedPlan | None = None
        self._fit: OneFit | None = None

    @property
    def plan(self) -> Plan | PhasedPlan:
        """The plan of what is computed again; known when training has begun."""
        if self._plan is None:
            raise ValueError("there is no plan yet: model.fit makes it before the first step")
        return self._plan

    def on_train_begin(self, logs: Any = None) -> None:
        """Plan, and replace the model's training function for this ``fit``."""
        _check(self.model)
        self._tell(f"Recompute: tracing a training step of {self.model.name}")
        batch = batch_of_fit(self.model, self._example)
        step = trace(self.model, batch, open_batch_of_fit())
        for one in step.steps:
            self._tell(f"Recompute: planning {len(one.units)} units, {len(one.ops)} operations")
        self._last_line = time.monotonic()
        self._plan = plan = self._choose(step, _gradients_pile_up(self.model), self._effort)
        self._tell(plan.summary())
        if memory.has_pool() and any(one.budget is not None for one in plan.phases):
            self._tell(f"TensorFlow's pool keeps freed memory, {_WITHOUT}")
        self._fit = OneFit(self.model, type(self).__name__, self._recomputing)

    @contextlib.contextmanager
    def _recomputing(self) -> Iterator[None]:
        with recomputing(self.model, self.plan), sums_in_order():
            yield

    def _tell(self, what: str) -> None:
        if self._verbose:
            print(what, flush=True)

    def _tell_now_and_then(self, what: str) -> None:
        """Report a long search, with a line every few seconds."""
        if time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._tell(f"Recompute: planning, {what}")
            self._last_line = time.monotonic()

    def _tell_progress(self, done: int, of: int) -> None:
        self._tell_now_and_then(f"{done} of {of} plans made")

    def _tell_better(self, overhead: float) -> None:
        self._tell_now_and_then(
            f"the best plan so far repeats {overhead:.1%} of a step's operations; Ctrl-C takes it"
        )

    def on_train_end(self, logs: Any = None) -> None:
        """Restore the model's own training function."""
        if self._fit is not None:
            self._fit.end()
        self._fit = None


_WITHOUT = (
    "so the process may grow by more than the budget. If that matters, start the program with "
    + " ".join(f"{name}={value}" for name, value in memory.WITHOUT_POOL.items())
)


def _check(model: keras.Model) -> None:
    if model.run_eagerly:
        raise ValueError(
            "Recompute works on the graph of a training step, and this model runs eagerly: "
            "compile it with run_eagerly=False"
        )
    if any(isinstance(one, AdaHessian) for one in optimizers_of(model)):
        raise ValueError(
            "Recompute saves nothing under AdaHessian: its second derivatives need all that "
            "Recompute would free. Train with another optimizer, or with smaller batches"
        )
    if model.jit_compile:
        raise ValueError(
            "Recompute can't tell XLA when to free memory: compile the model with jit_compile=False"
        )


def _gradients_pile_up(model: keras.Model) -> bool:
    """Return whether all gradients must exist before the first can be applied."""
    several = model.distribute_strategy.num_replicas_in_sync > 1
    return several or any(
        innermost(one) is not one or innermost(one).global_clipnorm for one in optimizers_of(model)
    )


# ------------------------------------------------------------------ arguments

_Choose = Callable[[TracedStep | Phases, bool, Effort], Plan | PhasedPlan]


def _budget(value: float | str) -> _Choose:
    size = number_of_bytes(value, "budget")
    return lambda step, pile_up, effort: plan_budget(step, size, pile_up, **effort._asdict())


def _fraction(value: float) -> _Choose:
    value = checked_fraction(value)
    return lambda step, pile_up, effort: plan_fraction(step, value, pile_up, **effort._asdict())


def _layers(value: Sequence[str]) -> _Choose:
    names = checked_layers(value)
    return lambda step, pile_up, _: plan_layers(step, names, pile_up)


def _segments(value: str) -> _Choose:
    arguments.choice(value, "segments", ("sqrt",))
    return lambda step, pile_up, _: plan_sqrt(step, pile_up)


def _saved(value: str | Path) -> _Choose:
    path = arguments.path(value, "plan")

    def load(step: TracedStep | Phases, pile_up: bool, _: Effort) -> Plan | PhasedPlan:
        plan = load_plan(path, step)
        if plan.pile_up != pile_up:
            raise ValueError(
                f"{path} has a plan for a fit that applies gradients "
                f"{_when(plan.pile_up)}, and this one applies them {_when(pile_up)}: plan again "
                "for this optimizer and number of replicas"
            )
        return plan

    return load


def _when(pile_up: bool) -> str:
    return "together" if pile_up else "one by one"


_CHOICES: dict[str, Callable[[Any], _Choose]] = {
    "budget": _budget,
    "fraction": _fraction,
    "layers": _layers,
    "segments": _segments,
    "plan": _saved,
}
