"""Keras optimizers for large batches.

Example:
    >>> import tfscale.optimizers
    >>> optimizer = tfscale.optimizers.LAMB(learning_rate=0.002, weight_decay=0.01)
"""

from tfscale.native import tensorflow_needed as _  # noqa: F401
from tfscale.training.optimizers.adahessian import AdaHessian
from tfscale.training.optimizers.lamb import LAMB
from tfscale.training.optimizers.lars import LARS
from tfscale.training.optimizers.paths import BIAS_AND_NORM

__all__ = ["BIAS_AND_NORM", "LAMB", "LARS", "AdaHessian"]
