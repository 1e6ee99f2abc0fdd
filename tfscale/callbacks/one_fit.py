"""Another training function for a model, for one ``fit``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras


class OneFit:
    """In place of a model's ``train_function``, for the ``fit`` that is beginning.

    Keras does not say when a ``fit`` ends with an error. So this looks whether it is still
    the one that it was made for, and if not, gives way.

    Args:
        model: that trains.
        owner: the name of the callback that wants it.
        around: a context for each call.
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
        self._before = _plain(model, owner)
        model.make_train_function(force=True)
        self._train = model.train_function
        model.train_function = self

    def __call__(self, iterator: Any) -> Any:
        """Called by Keras, once for each execution."""
        if not self._is_running():
            self.end()
            self._model.make_train_function()
            return self._model.train_function(iterator)
        with self._around():
            return self._train(iterator)

    def _is_running(self) -> bool:
        return self._model.history is self._history

    def end(self) -> None:
        """The model has its own function again."""
        self._model.train_function = self._before


def _plain(model: keras.Model, owner: str) -> Any:
    """The function that the model had, behind what an interrupted ``fit`` has left."""
    before = model.train_function
    while isinstance(before, OneFit):
        if before._is_running():
            raise ValueError(
                f"{before._owner} and {owner} both change the step of {model.name!r} that is "
                "traced, and neither can see what the other does to it. Leave one of them out"
            )
        before = before._before
    return before
