"""Measurement of a training's time and bytes: see ``tfscale.callbacks.Telemetry``."""

from tfscale.analysis.telemetry.stragglers import Stragglers, stragglers
from tfscale.analysis.telemetry.timeline import merge

__all__ = ["Stragglers", "merge", "stragglers"]
