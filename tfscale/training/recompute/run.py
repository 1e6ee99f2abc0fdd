"""Tracing of a model's training step, and training by a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.graphs import after, wait_for
from tfscale.bridge.hooks import ADVERSARIAL_STEP
from tfscale.bridge.tensorflow import CannotInitialize
from tfscale.support import arguments
from tfscale.training.recompute.early import with_early_products
from tfscale.training.recompute.phases import PhasedPlan
from tfscale.training.recompute.plan import Plan
from tfscale.training.recompute.read import read, short_device, writes
from tfscale.training.recompute.results import has_same_results
from tfscale.training.recompute.rewrite import rewrite
from tfscale.training.recompute.sized import Output, has_lists, with_sizes
from tfscale.training.recompute.traced_step import Phases, Piece, TracedStep
from tfscale.training.recompute.watch import Forward, Watch, parts_of


def trace(model: keras.Model, batch: Any, open_batch: Any = None) -> TracedStep | Phases:
    """Return the operations of a model's training step, up to its gradients.

    No step runs, but a model that is not built yet gets its weights.

    A step that applies gradients several times, as that of a GAN, has several phases.

    Args:
        model: a compiled model.
        batch: specifications of the batch that ``train_step`` takes.
        open_batch: specifications as ``fit`` knows them, which may leave lengths open.

    Example:
        >>> step = trace(model, (tf.TensorSpec([64, 8]), tf.TensorSpec([64, 1])))
    """
    arguments.instance(model, "model", keras.Model, "a keras.Model that is compiled")
    specs = tf.nest.flatten(batch)
    if not specs or not all(hasattr(x, "dtype") and hasattr(x, "shape") for x in specs):
        raise arguments.wrong(batch, "batch", "a structure of tensors or of tf.TensorSpec")
    if open_batch is not None and not _may_be(batch, open_batch):
        raise arguments.wrong(open_batch, "open_batch", "a structure of tf.TensorSpec, like batch")
    known = [spec.shape for spec in tf.nest.flatten(batch)]
    if open_batch is None or known == [spec.shape for spec in tf.nest.flatten(open_batch)]:
        return _joined(_Tracing(model).trace(batch))
    tracing = _Tracing(model, known)
    as_in_fit = tracing.trace(open_batch)
    has_sizes = tracing.has_sizes and not any(one.unknown for one in as_in_fit)
    if has_sizes and not tracing.has_loops:
        return _joined(as_in_fit)
    steps = _Tracing(model).trace(batch)
    pairs = zip(as_in_fit, steps, strict=True)
    if has_sizes and all(_peak(one) >= _peak(known) for one, known in pairs):
        return _joined(as_in_fit)
    return _joined(
        [
            dataclasses.replace(step, followed=has_same_results(step, other, pieces))
            for step, other, pieces in zip(steps, as_in_fit, tracing.pieces, strict=True)
        ]
    )


def _peak(step: TracedStep) -> float:
    return Plan(step, ()).plain_peak


def _joined(steps: Sequence[TracedStep]) -> TracedStep | Phases:
    return steps[0] if len(steps) == 1 else Phases(tuple(steps))


def _may_be(batch: Any, open_batch: Any) -> bool:
    """Return whether a batch has the shapes that other specifications leave open."""
    known, specs = tf.nest.flatten(batch), tf.nest.flatten(open_batch)
    return len(known) == len(specs) and all(
        isinstance(other, tf.TensorSpec) and other.shape.is_compatible_with(one.shape)
        for one, other in zip(known, specs)
    )


class _Tracing:
    """One trace of a model's step.

    Args:
        model: the model.
        known: the shapes of the batch's tensors, if the traced batch leaves lengths open.
    """

    def __init__(self, model: keras.Model, known: Sequence[tf.TensorShape] = ()) -> None:
        self._model = model
        self._known = known
        self._shapes: dict[Output, tf.TensorShape] = {}  # of the batch's tensors
        self._steps: list[TracedStep] = []  # one for each phase
        self._thread: int | None = None  # of the replica whose step is read
        self.has_sizes = True
        self.has_loops = False
        self.pieces: list[list[Piece]] = []  # of each phase

    def trace(self, batch: Any) -> list[TracedStep]:
        """Return the phases of the step that takes a batch of these specifications."""
        known = len(parts_of(self._model))
        self._trace(batch)
        if len(parts_of(self._model)) > known:  # layers have made layers, to be watched, too
            self._trace(batch)
        if not self._steps:
            raise ValueError(
                f"{type(self._model).__name__}.train_step passed no gradients to an optimizer "
                "after it called the model or its layers. Recompute needs that to find the "
                "backward pass. Keep optimizers in attributes of the model, and pass gradients to "
                "their apply or apply_gradients"
            )
        return self._steps

    def _trace(self, batch: Any) -> None:
        @tf.autograph.experimental.do_not_convert
        def one_step() -> None:  # runs twice if it makes the model's weights
            self._steps, self.pieces, self._thread = [], [], None
            self.has_sizes = True
            data = tf.nest.map_structure(
                lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape), batch
            )
            self._model.distribute_strategy.run(self._model.train_step, args=(data,))

        with contextlib.ExitStack() as stack:
            stack.enter_context(Watch(self._model, self._look, applies=False).looking())
            if self._known:
                stack.enter_context(ADVERSARIAL_STEP.on(self._model, self._take_batch))
            # To the end: only then TensorFlow initializes weights that the step has made.
            try:
                tf.function(one_step, autograph=False).get_concrete_function()
            except CannotInitialize as error:
                raise ValueError(
                    f"{self._model.name} makes weights in its first step, and Recompute cannot "
                    "initialize them on several devices before this step runs. Make them earlier: "
                    "call the model's layers once on a batch, in the scope of the strategy"
                ) from error

    def _take_batch(self, train_step: Any, model: keras.Model, data: Any) -> Any:
        """Note the tensors that the step gets: a strategy may have made them of the batch's."""
        tensors = tf.nest.flatten(data)
        self._shapes = {
            (tensor.op.name, tensor.value_index): shape
            for tensor, shape in zip(tensors, self._known)
        }
        return train_step(model, data)

    def _look(self, forward: Forward, gradients: list[Any]) -> None:
        thread = threading.get_ident()
        self._thread = self._thread or thread
        if thread != self._thread:  # all replicas make the same step
            return
        self.pieces.append(forward.pieces())
        originals = forward.graph.get_operations()
        sized = with_sizes(forward, gradients, self._shapes) if self._known else None
        self.has_sizes = self.has_sizes and (sized is not None or not self._known)
        self.has_loops = self.has_loops or has_lists(originals)
        seen, found, operations = sized or (forward, gradients, originals)
        step = read(seen, found, operations, originals)
        self._steps.append(with_early_products(step))


@contextlib.contextmanager
def recomputing(model: keras.Model, plan: Plan | PhasedPlan) -> Iterator[None]:
    """Make training steps that are traced in this context compute again what the plan says.

    Args:
        model: the model that was traced for the plan.
        plan: the parts to compute again.

    Example:
        >>> from tfscale import recompute
        >>> step = trace(model, (tf.TensorSpec([64, 8]), tf.TensorSpec([64, 1])))
        >>> with recomputing(model, recompute.plan_sqrt(step)):
        ...     history = model.fit(x, y, verbose=0)
    """

    arguments.instance(model, "model", keras.Model, "a keras.Model")
    arguments.instance(plan, "plan", (Plan, PhasedPlan), "a plan, such as plan_sqrt(step) returns")

    def change(forward: Forward, gradients: list[Any]) -> None:
        operations = forward.graph.get_operations()
        step = read(forward, gradients, operations)
        pieces, planned = forward.pieces(), [one.pieces for one in plan.phases]
        if len(pieces) not in planned[forward.phase : forward.phase + 1]:
            raise RuntimeError(
                f"{model.name} was planned with {' and then '.join(map(str, planned))} calls of "
                f"layers before gradients are applied, and now makes {len(pieces)} in phase "
                f"{forward.phase + 1}: Recompute needs a model that always runs the same layers"
            )
        _wait_for_phase_before(forward, operations, range(step.begin, step.end))
        again = plan.phases[forward.phase].again_in(step, pieces)
        rewrite(forward.graph, operations, step, again)

    with Watch(model, change).looking():
        yield


def _wait_for_phase_before(
    forward: Forward, operations: Sequence[tf.Operation], ops: range
) -> None:
    """Let a phase begin when the phase before has changed its variables.

    TensorFlow would compute both at the same time, as far as they don't need each other, and would
    hold the results of both. A forward pass can't begin before it has read its weights, and
    TensorFlow fuses nothing with that.
    """
    changed = [operations[i] for i in forward.applied if writes(operations[i])]
    if forward.device is not None:  # other replicas may be further
        own = short_device(forward.device)
        changed = [one for one in changed if short_device(one.device or forward.device) == own]
    if not changed:
        return
    with forward.graph.as_default():
        gate = after(changed, "again/phase")
    for index in ops:
        if operations[index].type == "ReadVariableOp":
            wait_for(operations[index], gate)
