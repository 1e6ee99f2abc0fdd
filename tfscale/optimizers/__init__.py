"""Keras optimizers for large batches.

Example:
    >>> import tfscale.optimizers
    >>> optimizer = tfscale.optimizers.LAMB(learning_rate=0.002, weight_decay=0.01)
"""

from typing import Any

from tfscale.keras_objects import KERAS_2
from tfscale.optimizers.lamb import LAMB
from tfscale.optimizers.lars import LARS
from tfscale.optimizers.paths import BIAS_AND_NORM

if not KERAS_2:
    from tfscale.optimizers.adahessian import AdaHessian


def __getattr__(name: str) -> Any:
    if name == "AdaHessian":
        raise AttributeError("AdaHessian needs Keras 3, and this is Keras 2: LARS, LAMB")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["BIAS_AND_NORM", "LAMB", "LARS", "AdaHessian"]
