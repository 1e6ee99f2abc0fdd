"""Finds out which function calls: Keras does not tell a strategy what a dataset is for."""

from __future__ import annotations

import itertools
import sys
import threading
from typing import Any

import tensorflow as tf

from tfscale.bridge.frames import frames
from tfscale.bridge.tensorflow import (
    WhileBodyFuncGraph,
    WhileCondFuncGraph,
    gradients_in_graph,
    imperative_grad,
)


def caller(
    kind: type | tuple[type, ...], levels: int | None = None, method: str | None = None
) -> Any:
    """Return the nearest object of a kind among those whose methods are being called, or None.

    Args:
        kind: classes of the object.
        levels: how many calls to look at; all by default.
        method: name of the method that is being called; any by default.
    """
    near = itertools.islice(frames(sys._getframe(1)), levels)
    named = (one for one in near if method in (None, one.f_code.co_name))
    found = (frame.f_locals.get("self") for frame in named)
    return next((one for one in found if isinstance(one, kind)), None)


def called_by(name: str, levels: int = 9) -> bool:
    """Whether a function of this name is near among those that are being called."""
    near = itertools.islice(frames(sys._getframe(2)), levels)
    return any(frame.f_code.co_name == name for frame in near)


def is_in_a_loop_of_a_replica() -> bool:
    """Whether this is traced in a ``tf.while_loop`` that a replica has begun, each its own."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    begun_in = getattr(threading.current_thread(), "graph", None)  # a replica's thread has one
    while graph is not None and graph is not begun_in:
        if isinstance(graph, (WhileBodyFuncGraph, WhileCondFuncGraph)):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def is_for_each_row() -> bool:
    """Whether this is traced for each row of something: in a loop, or in ``tf.vectorized_map``.

    A jacobian is such a map, which TensorFlow traces once in a scope of this name.
    """
    if tf.executing_eagerly():
        return False
    scopes = tf.compat.v1.get_default_graph().get_name_scope().split("/")
    return "loop_body" in scopes or is_in_a_loop_of_a_replica()


def goes_back() -> bool:
    """Whether TensorFlow is making gradients, and asks for those of a sum over replicas."""
    return any(called_by(name, levels=14) for name in _MAKE_GRADIENTS)


# Under a tape, and by ``tf.gradients``.
_MAKE_GRADIENTS = (imperative_grad.__name__, gradients_in_graph.__name__)
