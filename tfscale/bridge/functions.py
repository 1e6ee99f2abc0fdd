"""Functions of TensorFlow that a user's step calls, while a replica makes it."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.bridge.hooks import FUNCTION_CALL
from tfscale.bridge.tensorflow import Function, TfMethodTarget, converted


def inlined() -> contextlib.AbstractContextManager[None]:
    """Trace each ``tf.function`` that this thread calls in a block as a part of its caller.

    TensorFlow would keep its trace for later calls, by another replica or in another step, and
    with it the share of the batch that the first caller held. Nor could the terms of a loss be
    read that a function of its own computes. What XLA is to compile stays a function.
    """
    return FUNCTION_CALL.on(Function, _call, in_thread=True)


def _call(original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    if function._jit_compile:
        return original(function, *args, **kwargs)
    python = _with_its_object(function.python_function)
    if function._autograph and not tf.executing_eagerly():
        python = converted(python)
    return python(*args, **kwargs)


def _with_its_object(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method with its real object; TensorFlow binds it to one that stands for that."""
    bound = getattr(function, "__wrapped__", None)
    standing_in = getattr(bound, "__self__", None)
    if not isinstance(standing_in, TfMethodTarget):
        return function
    return types.MethodType(bound.__func__, standing_in.target)  # type: ignore[union-attr]
