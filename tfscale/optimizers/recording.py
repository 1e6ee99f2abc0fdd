"""Recording of eager steps on a tape, so that gradients can be differentiated."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from typing import Any

import keras
import tensorflow as tf

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

    A method shadows the model's ``train_step`` and calls it. The model's class stays as it is,
    nothing of it is saved, and in a graph it has no effect.
    """
    shadowed = vars(model).get("train_step")
    if not isinstance(getattr(shadowed, "__func__", None), _TrainStep):
        vars(model)["train_step"] = types.MethodType(_TrainStep(shadowed), model)
        model.train_function = None  # it may hold the method that is now shadowed


class _TrainStep:
    __name__ = "train_step"

    def __init__(self, shadowed: Any) -> None:
        self._shadowed = shadowed

    def __call__(self, model: keras.Model, data: Any) -> Any:
        step = self._shadowed or functools.partial(type(model).train_step, model)
        recording = getattr(innermost(model.optimizer), "recording", None)
        if recording is None:
            return step(data)
        if tf.executing_eagerly():
            _refuse_moments(model)
        with recording():
            return step(data)


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
