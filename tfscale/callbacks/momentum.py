"""Momentum when the learning rate changes (Goyal et al. 2017, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.optimizers import LARS


def buffers_with_rate(optimizer: Any) -> list[Any]:
    r"""The momentum buffers of an optimizer that hold learning rates.

    There are two ways to write momentum,

    .. math::
        u &\leftarrow \mu u + g, & w &\leftarrow w - \eta u \\
        v &\leftarrow \mu v + \eta g, & w &\leftarrow w - v

    and they are the same while :math:`\eta` is. The second has old rates in its buffer, so
    it goes on at the old rate for some ten steps after a change, unless the buffer is
    multiplied by the new rate over the old. Keras's SGD and RMSprop are written in that way,
    and LARS in its paper's form. All others of Keras and tfscale have no rate in a buffer of
    gradients.
    """
    kind = type(optimizer)
    if kind is keras.optimizers.SGD:
        return _there(optimizer, "momentums")
    if kind is keras.optimizers.RMSprop:
        return _there(optimizer, "_momentums")
    if kind is LARS:
        return _there(optimizer, "_momentums") if optimizer.form == "paper" else []
    if kind.__module__.startswith(("keras.", "tfscale.")):
        return []
    raise ValueError(
        f"momentum_correction=True: it is not known whether {kind.__name__} has the learning rate "
        "in its momentum. tfscale knows the optimizers of Keras and its own, but not classes "
        "derived from them. Leave momentum_correction out for such classes"
    )


def _there(optimizer: Any, name: str) -> list[Any]:
    """Before the first step there are no buffers, and without momentum never."""
    return [buffer for buffer in getattr(optimizer, name, []) if buffer is not None]


def multiplication(buffers: list[Any]) -> Callable[[Any], None]:
    """What multiplies buffers by a number, on all replicas.

    In a graph: one by one, a hundred variables would take longer than a step.
    """

    @tf.function
    def multiply(factor: Any) -> None:
        for buffer in buffers:
            buffer.assign(tf.convert_to_tensor(buffer) * tf.cast(factor, buffer.dtype))

    return lambda factor: multiply(tf.constant(factor, tf.float64))
