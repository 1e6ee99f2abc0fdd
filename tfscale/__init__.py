"""Keras training on many devices.

Importing this package is quick: only the parts that need TensorFlow import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfscale.bridge import started
from tfscale.support import messages
from tfscale.support.aliases import Aliases
from tfscale.support.version import __version__

if TYPE_CHECKING:
    from tfscale import callbacks, collectives, compression, native as ops, parallel, plan, sync
    from tfscale.analysis import curvature, quantize, telemetry
    from tfscale.cluster.this_worker import is_first, rank
    from tfscale.parallel.grid import Grid
    from tfscale.parallel.pipeline import Pipeline
    from tfscale.strategy import ScaleStrategy, auto_strategy
    from tfscale.training import adversarial, extreme, optimizers, recompute, schedules

__all__ = [
    "Grid",
    "Pipeline",
    "ScaleStrategy",
    "__version__",
    "adversarial",
    "auto_strategy",
    "callbacks",
    "collectives",
    "compression",
    "curvature",
    "extreme",
    "is_first",
    "ops",
    "optimizers",
    "parallel",
    "plan",
    "quantize",
    "rank",
    "recompute",
    "schedules",
    "sync",
    "telemetry",
]

# Users import these packages by short names.
_PACKAGES = {
    "tfscale.adversarial": "tfscale.training.adversarial",
    "tfscale.curvature": "tfscale.analysis.curvature",
    "tfscale.extreme": "tfscale.training.extreme",
    "tfscale.launch": "tfscale.tools.launch",
    "tfscale.ops": "tfscale.native",
    "tfscale.optimizers": "tfscale.training.optimizers",
    "tfscale.quantize": "tfscale.analysis.quantize",
    "tfscale.recompute": "tfscale.training.recompute",
    "tfscale.schedules": "tfscale.training.schedules",
    "tfscale.telemetry": "tfscale.analysis.telemetry",
}
_OBJECTS = {
    "Grid": "tfscale.parallel.grid",
    "Pipeline": "tfscale.parallel.pipeline",
    "ScaleStrategy": "tfscale.strategy",
    "auto_strategy": "tfscale.strategy",
    "is_first": "tfscale.cluster.this_worker",
    "rank": "tfscale.cluster.this_worker",
}

Aliases(_PACKAGES).install()
messages.set_up()
started.watch()


def __getattr__(name: str) -> Any:
    if name not in __all__ and f"tfscale.{name}" not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _OBJECTS:
        return getattr(importlib.import_module(_OBJECTS[name]), name)
    return importlib.import_module(f"tfscale.{name}")


def __dir__() -> list[str]:
    return list(__all__)
