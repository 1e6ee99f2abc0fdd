"""Layouts: who holds which numbers of a variable; and layers that many devices share."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfscale.parallel.experts import Experts

__all__ = ["Experts"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("tfscale.parallel.experts").Experts


def __dir__() -> list[str]:
    return [*globals(), *__all__]
