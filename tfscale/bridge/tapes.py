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
    original: Callable[..., Any], tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    change = _mine.target
    if change is not None and tape._tape is not None and not could_possibly_record():
        with tape:  # it goes on recording: what becomes of the target
            _mine.target = None
            try:
                target = change(target, sources)
            finally:
                _mine.target = change
    return original(tape, target, sources, *args, **kwargs)
