"""Facts that Keras gives to callbacks: their model, before which we act, and an epoch's steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfscale.bridge.hooks import SET_MODEL
from tfscale.bridge.installed import KERAS_2

Arrange = Callable[[Any, Sequence[Any]], None]


def steps_of_epoch(callback: keras.callbacks.Callback) -> int | None:
    """Return how many steps an epoch has; None if ``fit`` does not know, or has not said it."""
    steps: int | None = (callback.params or {}).get("steps")
    return steps


def before_callbacks_get_their_model(arrange: Arrange, strategy: Any) -> None:
    """Make Keras call ``arrange(model, callbacks)`` first, as long as a strategy lives.

    ``fit``, ``evaluate`` and ``predict`` give callbacks their model, and so does a user who makes a
    ``CallbackList``; some callbacks write as soon as they have it. Does nothing with Keras 2.

    Args:
        arrange: a function of a module; it is called once, however many strategies there are.
        strategy: the strategy whose life ends this.
    """
    if not KERAS_2:
        SET_MODEL.put(keras.callbacks.CallbackList, _set_model(arrange), while_lives=strategy)


@functools.cache  # so that Python sees that two replacements are the same one
def _set_model(arrange: Arrange) -> Callable[..., None]:
    def set_model(give: Callable[..., None], listed: Any, model: Any) -> None:
        if model is not None:
            arrange(model, listed.callbacks)
        give(listed, model)

    return set_model


def become(callback: Any, kind: type) -> None:
    """Put a class between a callback's class and Keras's: methods of the user's class stay.

    A hook on an object would hide the user's methods, and a hook on Keras's class would change
    callbacks of other models. So the callback gets another class, once, until it is gone.
    """
    own = type(callback)
    if not issubclass(own, kind):
        bases = (own, kind) if own not in kind.__mro__ else (kind,)
        callback.__class__ = type(own.__name__, bases, {"__module__": own.__module__})
