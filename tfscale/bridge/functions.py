"""Functions of TensorFlow that a user's step calls, while a replica makes it."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfscale.bridge.hooks import replaced
from tfscale.bridge.tensorflow import Function, TfMethodTarget


class _Mine(threading.local):
    inlines = False


_mine = _Mine()


@contextlib.contextmanager
def inlined() -> Iterator[None]:
    """While it lasts, a ``tf.function`` that this thread calls is traced as a part of its caller.

    TensorFlow would keep its trace for later calls, by another replica or in another step, and
    with it the share of the batch that the first caller held. Nor could the terms of a loss be
    read that a function of its own computes. What XLA is to compile stays a function.
    """
    before, _mine.inlines = _mine.inlines, True
    try:
        with replaced(Function, "__call__", _call):
            yield
    finally:
        _mine.inlines = before


def _call(original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    if not _mine.inlines or function._jit_compile:
        return original(function, *args, **kwargs)
    python = _with_its_object(function.python_function)
    if function._autograph and not tf.executing_eagerly():
        python = tf.__internal__.autograph.tf_convert(
            python, tf.__internal__.autograph.control_status_ctx()
        )
    return python(*args, **kwargs)


def _with_its_object(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method with its real object; TensorFlow binds it to one that stands for that."""
    bound = getattr(function, "__wrapped__", None)
    standing_in = getattr(bound, "__self__", None)
    if not isinstance(standing_in, TfMethodTarget):
        return function
    return types.MethodType(bound.__func__, standing_in.target)  # type: ignore[union-attr]
