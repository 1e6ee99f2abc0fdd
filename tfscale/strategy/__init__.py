"""``ScaleStrategy``, which trains one model on several devices."""

from tfscale.native import tensorflow_needed as _  # noqa: F401
from tfscale.strategy.auto import auto_strategy
from tfscale.strategy.strategy import ScaleStrategy

__all__ = ["ScaleStrategy", "auto_strategy"]
