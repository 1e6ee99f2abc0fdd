"""Keras training on many devices.

Importing this package is quick: only the parts that need TensorFlow import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfscale import messages
from tfscale.bridge import started
from tfscale.version import __version__

if TYPE_CHECKING:
    from tfscale import (
        adversarial,
        callbacks,
        collectives,
        compression,
        curvature,
        ops,
        optimizers,
        schedules,
        sync,
        telemetry,
    )
    from tfscale.launch.cluster import is_first, rank
    from tfscale.strategy import ScaleStrategy, auto_strategy

__all__ = [
    "ScaleStrategy",
    "__version__",
    "adversarial",
    "auto_strategy",
    "callbacks",
    "collectives",
    "compression",
    "curvature",
    "is_first",
    "ops",
    "optimizers",
    "rank",
    "schedules",
    "sync",
    "telemetry",
]

_HOMES = {
    "ScaleStrategy": "tfscale.strategy",
    "auto_strategy": "tfscale.strategy",
    "is_first": "tfscale.launch.cluster",
    "rank": "tfscale.launch.cluster",
}

messages.set_up()
started.watch()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    return importlib.import_module(f"tfscale.{name}")


def __dir__() -> list[str]:
    return list(__all__)
