"""The strategy: ``with ScaleStrategy().scope(): model.fit()``."""

from tfscale.strategy.auto import auto_strategy
from tfscale.strategy.strategy import ScaleStrategy

__all__ = ["ScaleStrategy", "auto_strategy"]
