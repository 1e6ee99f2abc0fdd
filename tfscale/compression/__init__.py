"""Compression methods: what replicas send of each gradient, and in which format.

- ``policy.py``: the choice of a wire, or a method, for each gradient.
- ``method.py``: the base class of methods, and the first method: ``Wire``.
- ``low_rank.py``: ``PowerSGD``; ``sparse.py``: ``TopK`` and ``RandomK``.
- ``switching.py``: methods that are made of others; ``staged.py``: ``Staged`` and ``Settled``;
  ``adaptive.py``: ``Adaptive``, for which ``deciding.py`` decides and ``adaptation.py`` runs the
  decisions.
"""

from tfscale.native import tensorflow_needed as _  # noqa: F401

# isort: split
from tfscale.compression.adaptive import Adaptive
from tfscale.compression.gradient import Gradient
from tfscale.compression.low_rank import PowerSGD
from tfscale.compression.method import Kept, Load, Method, Price, Wire
from tfscale.compression.policy import DEFAULT_SENSITIVE, MethodPolicy, WirePolicy
from tfscale.compression.sparse import RandomK, TopK
from tfscale.compression.staged import Settled, Staged
from tfscale.compression.switching import Switching

__all__ = [
    "DEFAULT_SENSITIVE",
    "Adaptive",
    "Gradient",
    "Kept",
    "Load",
    "Method",
    "MethodPolicy",
    "PowerSGD",
    "Price",
    "RandomK",
    "Settled",
    "Staged",
    "Switching",
    "TopK",
    "Wire",
    "WirePolicy",
]
