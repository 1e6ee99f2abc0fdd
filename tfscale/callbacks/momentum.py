"""Correction of momentum when the learning rate changes (Goyal et al. 2017, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.objects import momentums_of
from tfscale.training.optimizers import LARS


def buffers_with_rate(optimizer: Any) -> list[Any]:
    r"""Return the momentum buffers of an optimizer that hold learning rates.

    Momentum has two common forms,

    .. math::
        u &\leftarrow \mu u + g, & w &\leftarrow w - \eta u \\
        v &\leftarrow \mu v + \eta g, & w &\leftarrow w - v

    which are equal while :math:`\eta` is constant. The buffer of the second form holds old rates.
    So after a change it continues at the old rate for some ten steps, unless the buffer is
    multiplied by the new rate over the old. Keras's SGD and RMSprop use the second form, and so
    does LARS in its paper's form. No other optimizer of Keras or tfscale has a rate in a buffer of
    gradients.
    """
    kind = type(optimizer)
    if kind in (keras.optimizers.SGD, keras.optimizers.RMSprop):
        return momentums_of(optimizer)
    if kind is LARS:
        return momentums_of(optimizer) if optimizer.form == "paper" else []
    if kind.__module__.startswith(("keras.", "tfscale.")):
        return []
    raise ValueError(
        f"momentum_correction=True: tfscale does not know whether the momentum of {kind.__name__} "
        "contains the learning rate. It knows Keras's optimizers and its own, but not classes "
        "derived from them. Leave momentum_correction out for such classes"
    )


def multiplication(buffers: list[Any]) -> Callable[[Any], None]:
    """Return a function that multiplies buffers by a number, on all replicas.

    It is a graph, because multiplying a hundred variables one by one takes longer than a step.
    """

    @tf.function
    def multiply(factor: Any) -> None:
        for buffer in buffers:
            buffer.assign(tf.convert_to_tensor(buffer) * tf.cast(factor, buffer.dtype))

    return lambda factor: multiply(tf.constant(factor, tf.float64))
