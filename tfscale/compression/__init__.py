"""What is sent of a gradient, and in which format.

- ``policy.py``: which gradient is sent on which wire, or summed by which method.
- ``method.py``: what a method is, and the first one: ``Wire``.
- ``low_rank.py``: ``PowerSGD``; ``sparse.py``: ``TopK`` and ``RandomK``.
"""

from tfscale import tensorflow_needed as _  # noqa: F401
from tfscale.compression.gradient import Gradient
from tfscale.compression.low_rank import PowerSGD
from tfscale.compression.method import Kept, Load, Method, Wire
from tfscale.compression.policy import DEFAULT_SENSITIVE, MethodPolicy, WirePolicy
from tfscale.compression.sparse import RandomK, TopK

__all__ = [
    "DEFAULT_SENSITIVE",
    "Gradient",
    "Kept",
    "Load",
    "Method",
    "MethodPolicy",
    "PowerSGD",
    "RandomK",
    "TopK",
    "Wire",
    "WirePolicy",
]
