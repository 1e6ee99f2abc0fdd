"""The moment at which Keras's callbacks get their model, before they read or write anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfscale.bridge.installed import KERAS_2

Arrange = Callable[[Any, Sequence[Any]], None]


@functools.cache
def before_callbacks_get_their_model(arrange: Arrange) -> None:
    """Make Keras call ``arrange(model, callbacks)`` first, for the rest of the process.

    ``fit``, ``evaluate`` and ``predict`` give callbacks their model, and so does a user who makes a
    ``CallbackList``; some callbacks write as soon as they have it. Does nothing with Keras 2.
    """
    if KERAS_2:
        return
    kind = keras.callbacks.CallbackList
    give = kind.set_model

    @functools.wraps(give)
    def set_model(self: Any, model: Any) -> None:
        if model is not None:
            arrange(model, self.callbacks)
        give(self, model)

    kind.set_model = set_model
