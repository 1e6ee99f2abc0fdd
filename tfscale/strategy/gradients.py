"""Checks of the gradients of a step, windows of accumulated gradients, and measured curvature."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import (
    counter_of,
    innermost,
    measures_curvature,
    path_of,
    trained_by,
)
from tfscale.bridge.optimizers import scale_of
from tfscale.bridge.protocols import Optimizer, Variable
from tfscale.exchange.packing import place_of
from tfscale.exchange.rows import numbers_of, with_numbers
from tfscale.exchange.slots import Slots
from tfscale.strategy import origin
from tfscale.strategy.protocols import Strategy
from tfscale.strategy.step import during, this_step

Window = Callable[[list[Any]], list[Any]]

_NOBODY_COUNTS = (
    "sync={!r} counts the steps of a round in fit and in train_on_batch, but this step was passed "
    "to strategy.run, where tfscale cannot count them. Move the step into the model's train_step "
    "and call fit; or use sync=tfscale.sync.EveryStep(), the default"
)

_OF_A_LAYER = (
    "sync={!r} trains models with one optimizer, whose state replicas average, but the step of "
    "{!r} also applies gradients with {!r}, which the model does not hold itself. Train these "
    "weights with the optimizer that you pass to compile; or use sync=tfscale.sync.EveryStep(), "
    "the default"
)

_ROWS_COUNT_TWICE = (
    "with {} several replicas read the same rows, and tfscale weights their losses in fit and in "
    "train_on_batch, but this step was passed to strategy.run. Move the step into the model's "
    "train_step and call fit; or leave grid out"
)

_NOT_EAGERLY = (
    "sync={!r} cannot accumulate gradients in a model that is compiled with run_eagerly=True. "
    "Leave out run_eagerly, or the optimizer's gradient_accumulation_steps"
)


def refuse(strategy: Strategy, optimizer: Optimizer, variables: list[Variable]) -> None:
    """Raise if an optimizer cannot update these variables on several replicas.

    An optimizer that is not built yet is built for them.
    """
    origin.refuse(strategy, f"what {optimizer.name!r} is to update", variables)
    _refuse_overwritten(variables)
    if not optimizer.built:
        with tf.init_scope():
            optimizer.build(variables)
    _refuse_unknown(optimizer, variables)
    step = this_step()
    if strategy.rounds is not None and step.model is None:
        raise ValueError(_NOBODY_COUNTS.format(strategy.sync))
    if strategy.rounds is not None and optimizer is not step.model.optimizer:
        name = step.model.name
        raise ValueError(_OF_A_LAYER.format(strategy.sync, name, optimizer.name))
    if strategy.extended.grid.team > 1 and step.model is None:
        raise ValueError(_ROWS_COUNT_TWICE.format(strategy.extended.grid))
    accumulates = bool(innermost(optimizer).gradient_accumulation_steps)
    if accumulates and step.group is not None and tf.executing_eagerly():
        raise ValueError(_NOT_EAGERLY.format(strategy.sync))


def _refuse_overwritten(variables: list[Variable]) -> None:
    """Raise if the "gradient" of a variable is its new value: such values must not be summed."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                f"the variable {path_of(variable)} is overwritten with its gradient, as the scales "
                "of fp8 layers are, and each replica would write a different value. Train such "
                "layers on one device, or in another precision: "
                'keras.config.set_dtype_policy("mixed_bfloat16").'
            )


def _refuse_unknown(optimizer: Optimizer, variables: list[Variable]) -> None:
    """Raise if the optimizer does not know some variables.

    Keras raises for them on one device, too, but its error names only one variable.
    """
    unknown = [path_of(v) for v in variables if not is_known(optimizer, v)]
    if unknown:
        raise ValueError(
            f"the optimizer {optimizer.name!r} was built for {len(trained_by(optimizer))} "
            f"variables, but this step also trains {', '.join(unknown)}, whose layers were built "
            "after the optimizer. Build these layers before the optimizer (call them once, in the "
            "scope), or compile the model with a new optimizer."
        )


def is_known(optimizer: Optimizer, variable: Variable) -> bool:
    """Return whether the optimizer was built for a variable."""
    try:
        place_of(optimizer, variable)
    except KeyError:
        return False
    return True


# ---------------------------------------------------------------------- windows


def accumulated(
    strategy: Strategy,
    optimizer: Optimizer,
    grads: list[Any],
    variables: list[Variable],
    reduce: Callable[..., list[Any]] | None,
) -> tuple[list[Any], Window]:
    """Return the gradients to accumulate, and the function that sums them at the end of a window.

    Accumulators hold parts of a sum over all replicas; those of slices hold the sum itself. Where
    n replicas or groups each have a whole sum, or apply a sum of their own, they divide their
    gradients by n before, and multiply the window's sum by n.

    Args:
        strategy: strategy of the optimizer.
        optimizer: optimizer that accumulates gradients.
        grads: gradients of this step.
        variables: variables of the gradients.
        reduce: function that sums gradients over the team; None if the replica is alone, or if
            these are sums.
    """
    if optimizer is not innermost(optimizer):
        grads = _finite_on_all_or_none(grads)
    # Keras asks for a window's sums of these only.
    of_window = [v for g, v in zip(grads, variables, strict=True) if g is not None]
    number = _number_of_sums(strategy, are_sums=reduce is None)

    def times(factor: Any, grads: list[Any], weights: list[Variable]) -> list[Any]:
        scaled = strategy.parts.gradients.leaving_slices(lambda own, _: _times(own, factor))
        found: list[Any] = scaled(grads, weights)
        return found

    def window(parts: list[Any]) -> list[Any]:
        own = parts if number is None else times(number, parts, of_window)
        return own if reduce is None else reduce(own, of_window)

    if number is not None:
        grads = times(1 / tf.cast(number, tf.float64), grads, variables)
    return grads, window


def _number_of_sums(strategy: Strategy, are_sums: bool) -> Any:
    """Return how many sums replicas accumulate; None if they accumulate parts of a single one."""
    step = this_step()
    if are_sums:
        return tf.constant(strategy.extended.number_of_replicas, tf.float32)
    if step.is_of_all:
        return None
    number = tf.constant(strategy.rounds.teams.number, tf.float32)
    return number if step.alone is True else tf.where(step.alone, number, 1.0)


def _times(grads: list[Any], factor: Any) -> list[Any]:
    return [None if g is None else g * tf.cast(factor, g.dtype) for g in grads]


def _finite_on_all_or_none(grads: list[Any]) -> list[Any]:
    """Make a gradient NaN on all replicas if any gradient overflows on one of them.

    Replicas accumulate gradients on their own, and must skip the same steps.
    """
    given = [i for i, g in enumerate(grads) if g is not None]
    if not given:
        return grads
    flat = [numbers_of(grads[i]) for i in given]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in flat])
    overflow = tf.cast(tf.logical_not(finite), tf.float32)
    overflows = tf.distribute.get_replica_context().all_reduce("SUM", overflow)
    first, poison = given[0], tf.where(overflows > 0, float("nan"), 0.0)
    poisoned = with_numbers(grads[first], lambda x: x + tf.cast(poison, x.dtype))
    return [*grads[:first], poisoned, *grads[first + 1 :]]


def scale_of_losses(optimizer: Optimizer) -> tf.Tensor | None:
    """Return the loss scale, which is a factor of this step's gradients; None without scaling."""
    return None if optimizer is innermost(optimizer) else tf.convert_to_tensor(scale_of(optimizer))


# -------------------------------------------------------------------- curvature


def measured_curvature(
    optimizer: Optimizer, grads: list[Any], variables: list[Variable]
) -> list[Any]:
    """Return what the optimizer measures on this replica beside gradients; most measure nothing."""
    inner = innermost(optimizer)
    return inner.curvature(grads, variables) if measures_curvature(inner) else []


def sum_of_curvature(
    strategy: Strategy,
    optimizer: Optimizer,
    variables: list[Variable],
    curvature: list[Any],
) -> list[Any]:
    """Sum the measured curvature over the replicas that gradients are summed over.

    In steps that measure no curvature, nothing is sent: each replica gets its own values back.
    """
    step = this_step()
    if not curvature or step.is_single:
        return curvature
    if not step.is_of_all:
        curvature = [None if d is None else step.counted(d) for d in curvature]
    state, inner = Slots.of(optimizer, strategy), innermost(optimizer)

    def summed() -> list[Any]:
        return strategy.curvature_reducer.reduce(
            curvature, variables, optimizer, state, skip=step.sums_nothing
        )

    if inner.update_each == 1:
        return summed()
    found: list[Any] = tf.cond(inner.curvature_is_due(), summed, lambda: curvature)
    return found


def given_to(optimizer: Any, curvature: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the optimizer uses this curvature, divided by the loss scale."""
    if not curvature:
        return contextlib.nullcontext()
    inner = innermost(optimizer)
    scale = inner.loss_scale_factor if inner is optimizer else scale_of(optimizer)
    if scale is not None:
        curvature = [None if d is None else d / tf.cast(scale, d.dtype) for d in curvature]
    given: contextlib.AbstractContextManager[None] = inner.given(curvature)
    return given


def apply_unless(
    nobody_has_rows: tf.Tensor, apply: Callable[[], None], optimizer: Optimizer
) -> None:
    """Apply sums, unless nobody had rows: then the optimizer only counts the step."""

    def applied() -> tf.Operation:
        apply()
        return tf.no_op()

    def only_counted() -> tf.Operation:
        with during(this_step().as_reduced()):
            counter_of(optimizer).assign_add(1)
        return tf.no_op()

    tf.cond(nobody_has_rows, only_counted, applied)


def in_this_branch(tensors: list[Any]) -> list[Any]:
    """Return copies of tensors that belong to the branch that is traced; None stays None."""
    return [
        None if x is None else tf.nest.map_structure(tf.identity, x, expand_composites=True)
        for x in tensors
    ]
