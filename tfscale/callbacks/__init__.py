"""Callbacks for Keras's ``fit``."""

from tfscale.callbacks.preemption import Preempted, Preemption

__all__ = ["Preempted", "Preemption"]
