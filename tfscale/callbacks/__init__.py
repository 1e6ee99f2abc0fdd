"""Callbacks for Keras's ``fit``."""

from tfscale.callbacks.batch_growth import BatchGrowth
from tfscale.callbacks.preemption import Preempted, Preemption
from tfscale.callbacks.warmup import Warmup

__all__ = ["BatchGrowth", "Preempted", "Preemption", "Warmup"]
