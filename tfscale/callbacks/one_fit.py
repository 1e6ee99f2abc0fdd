"""Temporary steps of a model, for one ``fit``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras

from tfscale.bridge.hooks import ADVERSARIAL_STEP, TRAIN_FUNCTION

Step = Callable[..., Any]


class OneFit:
    """Hooks on a model's ``train_function`` and ``train_step``, for the ``fit`` that is beginning.

    Keras does not say when a ``fit`` ends with an error. So each call checks whether its ``fit`` is
    still running, and leaves the step to the model's own functions if not.

    Args:
        model: the model that trains.
        owner: name of the callback that replaces the functions.
        around: makes a context for each call of the training function.
        step: a replacement of the model's ``train_step``.
    """

    def __init__(
        self,
        model: keras.Model,
        owner: str,
        around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        step: Step | None = None,
    ) -> None:
        self._model = model
        self._owner = owner
        self._around = around
        self._step = step
        self._history = model.history
        _end_interrupted(model, owner)
        own = model.train_function
        self._hooks = []
        if step is not None:
            self._hooks.append(ADVERSARIAL_STEP.put(model, self._train_step))
        self._put(own)

    def __call__(self, own: Step, model: keras.Model, iterator: Any) -> Any:
        """Train for one execution."""
        if not self.is_running():
            self.end()
            model.make_train_function()
            return model.train_function(iterator)
        with self._around():
            return self._train(iterator)

    def _put(self, own: Step | None) -> None:
        """Train by a new function of the model, and give it its own one back afterwards."""
        self._model.make_train_function(force=True)
        self._train = self._model.train_function
        self._model.train_function = own
        self._hooks.append(TRAIN_FUNCTION.put(self._model, self))

    def trace_again(self) -> None:
        """Trace the step anew; the model's own function, which is as old, is made anew later."""
        self._hooks.pop().off()
        self._put(None)

    def _train_step(self, own: Step, model: keras.Model, data: Any) -> Any:
        if self._step is None or not self.is_running():
            return own(model, data)
        return self._step(own, model, data)

    def is_running(self) -> bool:
        """Return whether the ``fit`` goes on for which this was made."""
        return self._model.history is self._history

    def refuse(self, other: str) -> None:
        """Refuse another callback that changes the same step."""
        raise ValueError(
            f"{self._owner} and {other} both change the traced step of {self._model.name!r}, and "
            "neither sees the changes of the other. Leave one of them out"
        )

    def end(self) -> None:
        """Restore the model's own functions."""
        for hook in self._hooks:
            hook.off()


def _end_interrupted(model: keras.Model, owner: str) -> None:
    """Take off the hooks that an interrupted ``fit`` left; refuse those of a running one."""
    for other in TRAIN_FUNCTION.replacements(model):
        if other.is_running():
            other.refuse(owner)
        other.end()
    ADVERSARIAL_STEP.off(model)  # without its training function, if the model was compiled anew
