"""Collectives as TensorFlow ops.

Example:
    >>> import tensorflow as tf, tfscale.ops
    >>> group = tfscale.ops.Group.local()
    >>> @group.function
    ... def average(communicator, x):
    ...     return tfscale.ops.all_reduce(x, communicator, reduction="mean", wire="bf16")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfscale.collectives.wires import WIRES

if TYPE_CHECKING:
    from tfscale.native.bucket import BucketId
    from tfscale.native.collective import (
        DTYPES,
        all_gather,
        all_reduce,
        broadcast,
        mix,
        reduce_scatter,
    )
    from tfscale.native.flight import Flight, Taken
    from tfscale.native.group import Communicator, Group
    from tfscale.native.log import Execution, Total
    from tfscale.native.routes import all_to_all, transfer

__all__ = [
    "DTYPES",
    "WIRES",
    "BucketId",
    "Communicator",
    "Execution",
    "Flight",
    "Group",
    "Taken",
    "Total",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "mix",
    "reduce_scatter",
    "transfer",
]

_MODULES = {
    "BucketId": "bucket",
    "Communicator": "group",
    "Execution": "log",
    "Flight": "flight",
    "Group": "group",
    "Taken": "flight",
    "Total": "log",
    "all_to_all": "routes",
    "transfer": "routes",
}


def __getattr__(name: str) -> Any:
    """Import TensorFlow only when a program uses an op: `tfscale build` does not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("tfscale.native.tensorflow_needed")
    module = _MODULES.get(name, "collective")
    return getattr(importlib.import_module(f"tfscale.native.{module}"), name)


def __dir__() -> list[str]:
    return list(__all__)
