"""A temporary training function of a model, for one ``fit``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras


class OneFit:
    """A replacement of a model's ``train_function`` for the ``fit`` that is beginning.

    Keras does not say when a ``fit`` ends with an error. So each call checks whether its ``fit`` is
    still running, and restores the model's own function if not.

    Args:
        model: the model that trains.
        owner: name of the callback that replaces the function.
        around: makes a context for each call.
    """

    def __init__(
        self,
        model: keras.Model,
        owner: str,
        around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._model = model
        self._owner = owner
        self._around = around
        self._history = model.history
        self._before = _own_train_function(model, owner)
        model.make_train_function(force=True)
        self._train = model.train_function
        model.train_function = self

    def __call__(self, iterator: Any) -> Any:
        """Train for one execution."""
        if not self._is_running():
            self.end()
            self._model.make_train_function()
            return self._model.train_function(iterator)
        with self._around():
            return self._train(iterator)

    def _is_running(self) -> bool:
        return self._model.history is self._history

    def end(self) -> None:
        """Restore the model's own function."""
        self._model.train_function = self._before


def _own_train_function(model: keras.Model, owner: str) -> Any:
    """Return the model's own function, without those that an interrupted ``fit`` left."""
    before = model.train_function
    while isinstance(before, OneFit):
        if before._is_running():
            raise ValueError(
                f"{before._owner} and {owner} both change the step of {model.name!r} that is "
                "traced, and neither can see what the other does to it. Leave one of them out"
            )
        before = before._before
    return before
