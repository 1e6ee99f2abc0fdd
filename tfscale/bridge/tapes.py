"""Gradient tapes of TensorFlow, while a replica makes a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.bridge.hooks import TAPE_GRADIENT
from tfscale.bridge.tensorflow import could_possibly_record

Target = Callable[[Any, Any], Any]


def targets_changed(target: Target) -> contextlib.AbstractContextManager[None]:
    """Let tapes of this thread differentiate ``target(target, sources)`` in a block.

    A gradient that another tape records stays as it is, such as that of a gradient penalty.
    """
    return TAPE_GRADIENT.on(tf.GradientTape, _Changed(target), in_thread=True)


class _Changed:
    """A replacement of ``tf.GradientTape.gradient`` for one thread."""

    def __init__(self, target: Target) -> None:
        self._change = target
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
        if not (self._is_changing or used or _is_recorded_by_another(tape)):
            self._is_changing = True
            try:
                with _recording(tape):  # the tape must see how the target is changed
                    target = self._change(_times(target, output_gradients), sources)
            finally:
                self._is_changing = False
            output_gradients = None
        return original(tape, target, sources, output_gradients, **kwargs)


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
