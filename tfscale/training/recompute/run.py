"""Tracing of a model's training step, and training by a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale.support import arguments
from tfscale.training.recompute.early import with_early_products
from tfscale.training.recompute.plan import Plan
from tfscale.training.recompute.read import read
from tfscale.training.recompute.rewrite import rewrite
from tfscale.training.recompute.traced_step import TracedStep
from tfscale.training.recompute.watch import Forward, Watch


class _TracedFarEnough(Exception):
    """Raised when the step has been traced far enough."""


def trace(model: keras.Model, batch: Any) -> TracedStep:
    """Return the operations of a model's training step, up to its gradients. Nothing runs.

    Args:
        model: a compiled model, with all its variables.
        batch: specifications of the batch that ``train_step`` takes.

    Example:
        >>> step = trace(model, (tf.TensorSpec([64, 8]), tf.TensorSpec([64, 1])))
    """
    arguments.instance(model, "model", keras.Model, "a keras.Model that is compiled")
    specs = tf.nest.flatten(batch)
    if not specs or not all(hasattr(x, "dtype") and hasattr(x, "shape") for x in specs):
        raise arguments.wrong(batch, "batch", "a structure of tensors or of tf.TensorSpec")
    steps: list[TracedStep] = []

    def look(forward: Forward, gradients: list[Any]) -> None:
        step = read(forward, gradients, forward.graph.get_operations())
        steps.append(with_early_products(step))
        raise _TracedFarEnough

    @tf.autograph.experimental.do_not_convert
    def one_step() -> None:
        data = tf.nest.map_structure(
            lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape), batch
        )
        model.distribute_strategy.run(model.train_step, args=(data,))

    with contextlib.suppress(_TracedFarEnough), Watch(model, look).looking():
        tf.function(one_step, autograph=False).get_concrete_function()
    if not steps:
        raise ValueError(
            f"{type(model).__name__}.train_step passed no gradients to "
            "self.optimizer.apply_gradients after it called the model. Recompute needs that call "
            "to find the backward pass"
        )
    return steps[0]


@contextlib.contextmanager
def recomputing(model: keras.Model, plan: Plan) -> Iterator[None]:
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
    arguments.instance(plan, "plan", Plan, "a Plan, such as plan_sqrt(step) returns")

    def change(forward: Forward, gradients: list[Any]) -> None:
        operations = forward.graph.get_operations()
        step = read(forward, gradients, operations)
        pieces = forward.pieces()
        if len(pieces) != plan.pieces:
            raise RuntimeError(
                f"{model.name} was planned with {plan.pieces} calls of layers in a step, and now "
                f"makes {len(pieces)}: Recompute needs a model that always runs the same layers"
            )
        rewrite(forward.graph, operations, step, plan.again_in(step, pieces))

    with Watch(model, change).looking():
        yield
