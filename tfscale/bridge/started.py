"""Detection of the program's line that has started TensorFlow's runtime.

With several workers the runtime must know the cluster before it starts, and any dataset, tensor or
variable starts it.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from tfscale.bridge.frames import frames
from tfscale.bridge.hooks import START

# Packages that a line of the user's program calls before TensorFlow starts.
_LIBRARIES = ("tensorflow", "keras", "tf_keras", "tfscale")
_CONTEXT = "tensorflow.python.eager.context"

_line: str | None = None


def watch() -> None:
    """Record the line that starts TensorFlow from now on, if TensorFlow is imported already."""
    if _CONTEXT not in sys.modules or has_devices():
        return
    START.put(sys.modules[_CONTEXT].context(), _start)


def _start(start: Callable[[Any], None], context: Any) -> None:
    START.off(context)
    if not context._initialized:
        _note()
    start(context)


def has_devices() -> bool:
    """Return whether TensorFlow's runtime has started, and made the devices of this process."""
    module = sys.modules.get(_CONTEXT)
    return module is not None and bool(module.context()._initialized)


def _note() -> None:
    global _line
    users = (one for one in frames(sys._getframe()) if _package_of(one) not in _LIBRARIES)
    if frame := next(users, None):
        file, number = frame.f_code.co_filename, frame.f_lineno
        code = linecache.getline(file, number, frame.f_globals).strip()
        _line = f"{file}, line {number}" + (f": {code}" if code else "")


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".")[0]


def describe_start() -> str:
    """Return what has started TensorFlow, as the end of a sentence about it."""
    return "by a dataset, a tensor or a model" if _line is None else f"by {_line}"
