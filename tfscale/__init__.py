"""Keras training on many devices.

Importing this package is quick: TensorFlow is imported by the parts that need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfscale.version import __version__

if TYPE_CHECKING:
    from tfscale import callbacks
    from tfscale.strategy import ScaleStrategy, auto_strategy

__all__ = ["ScaleStrategy", "__version__", "auto_strategy", "callbacks"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "callbacks":
        return importlib.import_module("tfscale.callbacks")
    return getattr(importlib.import_module("tfscale.strategy"), name)
