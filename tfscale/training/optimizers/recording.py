"""Recording of eager steps on a tape, so that gradients can be differentiated."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.fit import forget_train_function
from tfscale.bridge.hooks import RECORDED_STEP
from tfscale.bridge.objects import innermost, layers_of


class OpenTape:
    """A tape that records from its construction until it is closed."""

    def __init__(self) -> None:
        self.tape = tf.GradientTape(persistent=True)
        self._open = contextlib.ExitStack()
        self._open.enter_context(self.tape)

    def close(self) -> None:
        """Stop recording; the recorded operations can be differentiated."""
        self._open.close()


class Now(threading.local):
    """State of an optimizer on this thread: each replica of a process has its own."""

    open_tape: OpenTape | None = None
    given: list[Any] | None = None
    next: list[Any] | None = None
    curvature: dict[int, Any] | None = None

    def __reduce__(self) -> Any:
        return Now, ()


def follow(model: keras.Model) -> None:
    """Let AdaHessian record a model's eager steps, if the model has such an optimizer then.

    The model's class stays as it is, nothing of the hook is saved, and in a graph it has no effect.
    """
    if not RECORDED_STEP.replacements(model):
        RECORDED_STEP.put(model, _record)
        forget_train_function(model)  # it may hold the step that is now replaced


def _record(step: Callable[..., Any], model: keras.Model, data: Any) -> Any:
    recording = getattr(innermost(model.optimizer), "recording", None)
    if recording is None:
        return step(model, data)
    if tf.executing_eagerly():
        _refuse_moments(model)
    with recording():
        return step(model, data)


def _refuse_moments(model: keras.Model) -> None:
    """Refuse layers with wrong recorded moments; in graphs ``curvature.in_graph`` corrects them."""
    for layer in layers_of(model):
        kinds = {kind.__name__ for kind in type(layer).__mro__}
        if kinds & _OF_MOMENTS and not getattr(layer, "synchronized", False):
            raise NotImplementedError(_MOMENTS % layer.name)


# by name, since tensorflow-addons has its own classes
_OF_MOMENTS = {"BatchNormalization", "LayerNormalization", "GroupNormalization"}

_MOMENTS = (
    "AdaHessian cannot measure curvature eagerly where %s normalizes: TensorFlow treats the mean "
    "within the variance as constant, which is wrong for second derivatives. Compile without "
    "run_eagerly=True: in a graph it can."
)
