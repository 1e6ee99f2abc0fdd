"""Gradient tapes of TensorFlow, while a replica makes a step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfscale.bridge.graphs import next_number
from tfscale.bridge.hooks import TAPE_GRADIENT
from tfscale.bridge.objects import is_variable
from tfscale.bridge.tensorflow import could_possibly_record

Target = Callable[..., Any]
Result = Callable[[list[Any], list[Any]], list[Any]]


def gradients_changed(
    result: Result, change: Target | None = None, in_thread: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Let tapes give other results, and differentiate another target, in a block.

    Args:
        result: function of all gradients and their sources that returns other gradients.
        change: function of a target and the sources that returns what is differentiated; None
            for the target itself. A target whose gradient another tape records stays as it is, as
            for a gradient penalty.
        in_thread: whether only tapes of this thread do so.
    """

    def gradient(compute: Callable[..., Any], tape: Any, sources: Any) -> Any:
        as_it_is = change is None or _is_recorded_by_another(tape)
        found = compute() if as_it_is else compute(change)
        return _new_gradients(tape, result, found, sources)

    return _gradient_replaced(gradient, in_thread)


def inner_gradients_changed(
    change: Target, result: Result, by_tensors: bool
) -> contextlib.AbstractContextManager[None]:
    """Let tapes of all threads differentiate another target, and give other results, in a block.

    Tapes that another tape records are changed, as for a gradient penalty.

    Args:
        change: function of a target, the sources, and whether another tape records the gradient,
            which returns what is differentiated.
        result: function of all gradients and their sources that returns other gradients.
        by_tensors: whether tapes that differentiate by tensors are changed, too, as for adversarial
            samples.
    """

    def gradient(compute: Callable[..., Any], tape: Any, sources: Any) -> Any:
        is_inner = _is_recorded_by_another(tape)
        of_weights = all(map(is_variable, tf.nest.flatten(sources)))
        if not is_inner and (of_weights or not by_tensors):
            return compute()
        return _new_gradients(tape, result, compute(change, is_inner), sources)

    return _gradient_replaced(gradient)


def after_backward_passes(
    body: Callable[[int], None],
) -> contextlib.AbstractContextManager[None]:
    """Call a function after each backward pass that this thread traces in a block.

    Args:
        body: gets the number of the backward pass's first operation.
    """

    def gradient(original: Callable[..., Any], tape: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return original(tape, *args, **kwargs)
        begin = next_number(tf.compat.v1.get_default_graph())
        found = original(tape, *args, **kwargs)
        body(begin)
        return found

    return TAPE_GRADIENT.on(tf.GradientTape, gradient, in_thread=True)


def _gradient_replaced(
    replacement: Callable[..., Any], in_thread: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Call ``replacement(compute, tape, sources)`` for gradients of tapes, in a block.

    ``compute()`` returns the gradients, and ``compute(change, ...)`` those of the target that
    ``change(target, sources, ...)`` returns. Tapes that compute this target are left alone, and so
    are those of operations whose gradient is computed, such as ``tf.recompute_grad``.
    """
    inner = threading.local()

    # TensorFlow's names, for the user may write target=... and sources=...
    def gradient(
        original: Callable[..., Any],
        tape: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        **kwargs: Any,
    ) -> Any:
        def compute(change: Target | None = None, *more: Any) -> Any:
            with _flag(inner):
                if change is None:
                    return original(tape, target, sources, output_gradients, **kwargs)
                with _recording(tape):  # the tape must see how the target is changed
                    changed = change(_times(target, output_gradients), sources, *more)
                return original(tape, changed, sources, **kwargs)

        if tape._tape is None or getattr(inner, "now", False):
            return original(tape, target, sources, output_gradients, **kwargs)
        return replacement(compute, tape, sources)

    return TAPE_GRADIENT.on(tf.GradientTape, gradient, in_thread)


@contextlib.contextmanager
def _flag(inner: threading.local) -> Iterator[None]:
    inner.now = True
    try:
        yield
    finally:
        inner.now = False


def _new_gradients(tape: Any, result: Result, found: Any, sources: Any) -> Any:
    with contextlib.nullcontext() if tape._tape is None else _recording(tape):
        changed = result(tf.nest.flatten(found), tf.nest.flatten(sources))
    return tf.nest.pack_sequence_as(sources, changed)


def _times(target: Any, factors: Any) -> Any:
    """Return numbers that have the gradient of targets which are multiplied by factors."""
    if factors is None:
        return target
    return [
        x if factor is None else tf.reduce_sum(x * tf.cast(factor, x.dtype))
        for x, factor in zip(tf.nest.flatten(target), tf.nest.flatten(factors), strict=True)
    ]


def _is_recorded_by_another(tape: Any) -> bool:
    with tape.stop_recording() if tape._recording else contextlib.nullcontext():
        return bool(could_possibly_record())


def _recording(tape: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a tape records; within its own ``with`` it records anyway."""
    return contextlib.nullcontext() if tape._recording else tape
