"""Measurement of a training's time and bytes: see ``tfscale.callbacks.Telemetry``."""

from tfscale.analysis.telemetry.timeline import merge

__all__ = ["merge"]
