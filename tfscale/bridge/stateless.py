"""Keras's stateless scopes, in which variables have other values, or are made without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfscale.bridge.installed import KERAS_2

if not KERAS_2:
    from keras.src.backend.common import global_state
    from keras.src.backend.common.stateless_scope import in_stateless_scope
    from keras.src.backend.common.variables import register_uninitialized_variable


class _Waiting:
    """Function that Keras takes for a variable, to which it gives a value at the end of a scope."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._deferred_initialize = function


def call_when_variables_have_values(function: Callable[[], None]) -> None:
    """Call a function now; at the end of a stateless scope, if Keras is in one."""
    if KERAS_2 or not in_stateless_scope():
        function()
    else:
        register_uninitialized_variable(_Waiting(function))


def regularized(model: keras.Model) -> list[tuple[Any, Any]]:
    """Return the variables whose values Keras takes from a scope for penalties, with their values.

    A stateless scope must have them, whichever variables it is made for.
    """
    return [(v, v.value) for v in model.trainable_variables if v.regularizer is not None]


def forget_unmade_variables() -> None:
    """Forget variables that could not be made: Keras 3 would try again in each later model."""
    global_state.set_global_attribute("uninitialized_variables", [])
