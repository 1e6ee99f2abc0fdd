"""Hooks that make an optimizer apply gradients summed over all replicas.

Clipping, decay and loss scaling then get the same gradients as on one device. Accumulated
gradients are summed once, at the end of their window.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfscale.bridge import hooks
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
from tfscale.exchange.reducer import Reducer
from tfscale.exchange.state import ExchangeState
from tfscale.strategy import origin, own_losses
from tfscale.strategy.current import current, during, on_a_replica

_NOBODY_COUNTS = (
    "sync={!r} trains models by fit and train_on_batch, and this step was passed to strategy.run: "
    "there nobody counts the steps of a round. Give the model a train_step, or use "
    "sync=tfscale.sync.EveryStep(), the default"
)

_NOT_EAGERLY = (
    "sync={!r} accumulates gradients in graphs only, and this model is compiled with "
    "run_eagerly=True. Leave that out, or leave gradient_accumulation_steps out of the optimizer"
)

if TYPE_CHECKING:
    from tfscale.strategy.strategy import ScaleStrategy


@contextlib.contextmanager
def hooked(strategy: ScaleStrategy, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Make these optimizers apply sums over all replicas within this context."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            apply = functools.partial(_apply, strategy)
            stack.enter_context(hooks.APPLY.on(optimizer, apply))
            stack.enter_context(hooks.CLIP_GRADIENTS.on(optimizer, _end_of_window))
        yield


def _apply(
    strategy: ScaleStrategy,
    of_keras: Callable[..., Any],
    optimizer: Optimizer,
    grads: Any,
    trainable_variables: Any = None,
) -> Any:
    original = functools.partial(of_keras, optimizer)
    if current.reduced or not on_a_replica():
        return original(grads, trainable_variables)
    grads = own_losses.scaled_gradients(list(grads)) if current.own else list(grads)
    variables = list(trainable_variables or trained_by(optimizer))
    origin.refuse(strategy, f"what {optimizer.name!r} is to update", variables)
    _refuse_overwritten(variables)
    reducer: Reducer = strategy.reducer
    state = ExchangeState.of(optimizer, strategy)
    if not optimizer.built:
        with tf.init_scope():
            optimizer.build(variables)
    _refuse_unknown(optimizer, variables)
    if strategy.rounds is not None and current.model is None:
        raise ValueError(_NOBODY_COUNTS.format(strategy.sync))
    inner = innermost(optimizer)
    reduce = functools.partial(reducer.reduce, optimizer=optimizer, state=state)
    windows = bool(inner.gradient_accumulation_steps)  # accumulated gradients are dense
    if current.alone is not False:
        apply = functools.partial(original, trainable_variables=trainable_variables)
        return _apply_alone(strategy, apply, optimizer, grads, variables)
    reducer.prepare(state, optimizer, variables, grads, rows_too=not windows)
    curvature = inner.curvature(grads, variables) if measures_curvature(inner) else []
    if windows:
        curvature = sum_of_curvature(strategy, optimizer, variables, curvature)
        if optimizer is not inner:
            grads = _finite_on_all_or_none(grads)
        waiting = _with_gradients(grads, variables)
        window = functools.partial(reduce, variables=waiting)
        with during(reduced=True, window=window), _given(optimizer, curvature):
            return original(grads, trainable_variables)
    if optimizer is not inner:  # the loss scale is a factor of this step's gradients
        reduce = functools.partial(reduce, scale=tf.convert_to_tensor(scale_of(optimizer)))
    grads = reduce(grads, variables=variables)
    curvature = sum_of_curvature(strategy, optimizer, variables, curvature)
    with during(reduced=True), _given(optimizer, curvature):
        return original(grads, trainable_variables)


def _apply_alone(
    strategy: ScaleStrategy,
    apply: Callable[[list[Any]], Any],
    optimizer: Optimizer,
    grads: list[Any],
    variables: list[Variable],
) -> None:
    """Apply a replica's own gradients, in a step that replicas make alone.

    A replica without rows changes nothing. Some steps may be synchronous, as at the start of
    ``LocalSGD``: replicas then apply the sum over all of them. A group that makes its steps
    together applies the sum over the group. Each replica accumulates a part of a sum over all
    replicas, as it does when all steps are synchronous.
    """
    curvature: list[Any] = []
    summed = current.group is not None or current.alone is not True
    if summed:  # placeholder rows can produce NaN, and NaN * 0 is NaN: mask them
        grads = [None if g is None else current.rows.counted(g) for g in grads]
    if measures_curvature(optimizer):
        own = optimizer.curvature(grads, variables)
        curvature = sum_of_curvature(strategy, optimizer, variables, own)
    state, windows = ExchangeState.of(optimizer, strategy), optimizer.gradient_accumulation_steps
    sums = window = None
    if summed:
        strategy.reducer.prepare(state, optimizer, variables, grads, rows_too=not windows)
        whose = _with_gradients(grads, variables) if windows else variables
        sums = functools.partial(_sums_of_some, strategy, optimizer, whose)
    if windows:
        if current.group is not None and tf.executing_eagerly():
            raise ValueError(_NOT_EAGERLY.format(strategy.sync))
        agreeing = _agreeing(strategy)
        grads = _times(grads, 1 / agreeing)
        window = functools.partial(_own_of_window, agreeing, sums)
    elif sums:
        grads = sums(grads)

    def applied() -> tf.Operation:
        own = _here(grads)
        given = _given(optimizer, _here(curvature))
        with during(reduced=True, window=window), given:
            apply(own)
        return tf.no_op()

    def only_counted() -> tf.Operation:
        with during(reduced=True):
            counter_of(optimizer).assign_add(1)
        return tf.no_op()

    # Keras ends some epochs with a step that has no data and no gradients: it must count nothing.
    with tf.control_dependencies([g for g in grads if g is not None]):
        tf.cond(current.rows.nobody, only_counted, applied)


def _with_gradients(grads: list[Any], variables: list[Variable]) -> list[Variable]:
    """Return the variables that have gradients; Keras asks for a window's sums of these only."""
    return [v for g, v in zip(grads, variables, strict=True) if g is not None]


def _agreeing(strategy: ScaleStrategy) -> Any:
    """Return how many replicas, or groups, apply gradients of their own in this step."""
    assert strategy.rounds is not None
    agreeing = tf.constant(strategy.rounds.teams.number, tf.float32)
    return agreeing if current.alone is True else tf.where(current.alone, agreeing, 1.0)


def _own_of_window(agreeing: Any, sums: Callable[[Any], Any] | None, parts: list[Any]) -> list[Any]:
    """Return the gradients that a replica, or its group, has accumulated in a window.

    Accumulators hold parts of a sum over all replicas. So each part is multiplied by ``agreeing``.
    """
    grads = _times(parts, agreeing)
    return grads if sums is None else sums(grads)


def _times(grads: list[Any], factor: Any) -> list[Any]:
    return [None if g is None else g * tf.cast(factor, g.dtype) for g in grads]


def _sums_of_some(
    strategy: ScaleStrategy, optimizer: Optimizer, variables: list[Variable], grads: list[Any]
) -> list[Any]:
    """Sum gradients over a group that holds rows, or over all replicas in synchronous steps."""
    given = [i for i, g in enumerate(grads) if g is not None]
    own, theirs = [grads[i] for i in given], [variables[i] for i in given]
    state = ExchangeState.of(optimizer, strategy)
    sums = strategy.reducer.reduce(own, theirs, optimizer, state, skip=_nothing_to_sum())
    done = dict(zip(given, sums, strict=True))
    return [done.get(i) for i in range(len(grads))]


def _here(tensors: list[Any]) -> list[Any]:
    """Return copies of tensors that belong to the branch that is traced; None stays None."""
    return [
        None if x is None else tf.nest.map_structure(tf.identity, x, expand_composites=True)
        for x in tensors
    ]


def sum_of_curvature(
    strategy: ScaleStrategy,
    optimizer: Optimizer,
    variables: list[Variable],
    curvature: list[Any],
) -> list[Any]:
    """Sum the measured curvature over the replicas that gradients are summed over.

    In steps that measure no curvature, nothing is sent: each replica gets its own values back.
    """
    if not curvature or (current.alone is True and current.group is None):
        return curvature
    if current.alone is not False:  # placeholder rows can produce NaN, and NaN * 0 is NaN
        curvature = [None if d is None else current.rows.counted(d) for d in curvature]
    state, inner = ExchangeState.of(optimizer, strategy), innermost(optimizer)

    def summed() -> list[Any]:
        return strategy.curvature_reducer.reduce(
            curvature, variables, optimizer, state, skip=_nothing_to_sum()
        )

    if inner.update_each == 1:
        return summed()
    found: list[Any] = tf.cond(inner.curvature_is_due(), summed, lambda: curvature)
    return found


def _nothing_to_sum() -> tf.Tensor | None:
    """Return whether replicas send nothing in this step; None if they always send.

    All replicas that would exchange with each other get the same answer.
    """
    if current.group is not None:
        nobody: tf.Tensor = current.rows.nobody
        return nobody
    return None if current.alone is False else current.alone


def _given(optimizer: Any, curvature: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the optimizer uses this curvature, divided by the loss scale."""
    if not curvature:
        return contextlib.nullcontext()
    inner = innermost(optimizer)
    scale = inner.loss_scale_factor if inner is optimizer else scale_of(optimizer)
    if scale is not None:
        curvature = [None if d is None else d / tf.cast(scale, d.dtype) for d in curvature]
    given: contextlib.AbstractContextManager[None] = inner.given(curvature)
    return given


def _refuse_overwritten(variables: list[Variable]) -> None:
    """Raise if the "gradient" of a variable is its new value: such values must not be summed."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                f"{path_of(variable)} takes its gradient as its value (fp8 layers update their "
                "scales in this way), and each replica has another value. Train such layers on one "
                'device or in another precision: keras.config.set_dtype_policy("mixed_bfloat16").'
            )


def _refuse_unknown(optimizer: Optimizer, variables: list[Variable]) -> None:
    """Raise if the optimizer does not know some variables.

    Keras raises for them on one device, too, but its error names only one variable.
    """
    unknown = [path_of(v) for v in variables if not _is_known(optimizer, v)]
    if unknown:
        raise ValueError(
            f"the optimizer {optimizer.name!r} was built for {len(trained_by(optimizer))} "
            f"variables, and this step is to train others: {', '.join(unknown)}. Their layers were "
            "built after the optimizer. Build them first (call them once, in the scope), or make "
            "and compile a new optimizer."
        )


def _is_known(optimizer: Optimizer, variable: Variable) -> bool:
    try:
        place_of(optimizer, variable)
    except KeyError:
        return False
    return True


def _end_of_window(clip: Callable[..., Any], optimizer: Optimizer, grads: Any) -> Any:
    """Sum a window's gradients, then clip them.

    This replaces ``_clip_gradients``, the first method that Keras calls with a window's gradients.
    """
    if current.window is not None:
        grads = current.window(list(grads))
    return clip(optimizer, grads)


def _finite_on_all_or_none(grads: list[Any]) -> list[Any]:
    """Make a gradient NaN on all replicas if any gradient overflows on one of them.

    Replicas accumulate gradients on their own, and must skip the same steps.
    """
    finite = [
        tf.reduce_all(tf.math.is_finite(g.values if isinstance(g, tf.IndexedSlices) else g))
        for g in grads
        if g is not None
    ]
    if not finite:
        return grads
    overflow = tf.cast(tf.logical_not(tf.reduce_all(finite)), tf.float32)
    overflows = tf.distribute.get_replica_context().all_reduce("SUM", overflow)
    poison = tf.where(overflows > 0, float("nan"), 0.0)
    first = next(i for i, g in enumerate(grads) if g is not None)
    g = grads[first]
    if isinstance(g, tf.IndexedSlices):
        values = g.values + tf.cast(poison, g.dtype)
        poisoned = tf.IndexedSlices(values, g.indices, g.dense_shape)
    else:
        poisoned = g + tf.cast(poison, g.dtype)
    return [*grads[:first], poisoned, *grads[first + 1 :]]
