"""Gradient tapes of TensorFlow, while a replica makes a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.bridge.graphs import next_number
from tfscale.bridge.hooks import TAPE_GRADIENT
from tfscale.bridge.tensorflow import could_possibly_record

Target = Callable[[Any, Any], Any]


Result = Callable[[list[Any], list[Any]], list[Any]]


def gradients_changed(
    target: Target | None = None, result: Result | None = None, in_thread: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Let tapes differentiate another target, and give other results, in a block.

    Args:
        target: function of a target and the sources that returns what is differentiated; None
            for the target itself. A target whose gradient another tape records stays as it is, as
            for a gradient penalty.
        result: function of all gradients and their sources that returns other gradients.
        in_thread: whether only tapes of this thread do so.
    """
    return TAPE_GRADIENT.on(tf.GradientTape, _Changed(target, result), in_thread)


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


class _Changed:
    """A replacement of ``tf.GradientTape.gradient``."""

    def __init__(self, target: Target | None, result: Result | None) -> None:
        self._change, self._result = target, result
        self._is_changing = False  # tapes that compute the new target are left alone

    def __call__(
        self,
        original: Callable[..., Any],
        tape: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        **kwargs: Any,
    ) -> Any:
        used = tape._tape is None
        change = None if self._is_changing or used else self._change
        if change is not None and not _is_recorded_by_another(tape):
            self._is_changing = True
            try:
                with _recording(tape):  # the tape must see how the target is changed
                    target = change(_times(target, output_gradients), sources)
            finally:
                self._is_changing = False
            output_gradients = None
        found = original(tape, target, sources, output_gradients, **kwargs)
        if self._result is None or self._is_changing:
            return found
        with contextlib.nullcontext() if used or tape._tape is None else _recording(tape):
            changed = self._result(tf.nest.flatten(found), tf.nest.flatten(sources))
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
