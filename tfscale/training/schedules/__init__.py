"""Learning-rate schedules for training with large batches.

Example:
    >>> from tfscale import schedules
    >>> schedule = schedules.Drops(
    ...     0.1, at=[30, 60, 80], warmup=5, start=0.1, unit="epochs", base_batch=256
    ... )
    >>> print(schedule.for_batch(8192).rate)
    3.2
"""

from tfscale.native import tensorflow_needed as _  # noqa: F401
from tfscale.training.schedules.curves import Constant, Cosine, Drops, InverseSquareRoot, Polynomial
from tfscale.training.schedules.scaling import linear_scaling, square_root_scaling
from tfscale.training.schedules.schedule import Schedule

__all__ = [
    "Constant",
    "Cosine",
    "Drops",
    "InverseSquareRoot",
    "Polynomial",
    "Schedule",
    "linear_scaling",
    "square_root_scaling",
]
