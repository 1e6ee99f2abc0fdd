"""Gradient tapes of TensorFlow, while a replica makes a step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfscale.bridge.hooks import replaced
from tfscale.bridge.tensorflow import could_possibly_record

Target = Callable[[Any, Any], Any]


class _Mine(threading.local):
    target: Target | None = None


_mine = _Mine()


@contextlib.contextmanager
def targets_changed(target: Target) -> Iterator[None]:
    """While it lasts, tapes of this thread differentiate ``target(target, sources)``.

    A gradient that another tape records is left alone, as that of a gradient penalty.
    """
    before, _mine.target = _mine.target, target
    try:
        with replaced(tf.GradientTape, "gradient", _gradient):
            yield
    finally:
        _mine.target = before


def _gradient(
    original: Callable[..., Any],
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    **kwargs: Any,
) -> Any:
    change = _mine.target
    if change is not None and tape._tape is not None and not _is_recorded_by_another(tape):
        with _recording(tape):  # what becomes of the target
            _mine.target = None
            try:
                target = change(_times(target, output_gradients), sources)
            finally:
                _mine.target = change
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
    """A context in which a tape records; within its own ``with`` it does so anyway."""
    return contextlib.nullcontext() if tape._recording else tape
