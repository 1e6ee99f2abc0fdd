"""What a training costs and where its time goes: see ``tfscale.callbacks.Telemetry``."""

from tfscale.telemetry.timeline import merge

__all__ = ["merge"]
