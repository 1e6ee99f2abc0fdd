"""Callbacks for Keras's ``fit``."""

from tfscale.native import tensorflow_needed as _  # noqa: F401

# isort: split
from tfscale.callbacks.adversarial import Adversarial
from tfscale.callbacks.batch_growth import BatchGrowth
from tfscale.callbacks.curvature import Curvature
from tfscale.callbacks.preemption import Preempted, Preemption
from tfscale.callbacks.recompute import Recompute
from tfscale.callbacks.telemetry import Telemetry
from tfscale.callbacks.warmup import Warmup

__all__ = [
    "Adversarial",
    "BatchGrowth",
    "Curvature",
    "Preempted",
    "Preemption",
    "Recompute",
    "Telemetry",
    "Warmup",
]
