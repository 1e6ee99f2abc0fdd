"""Detection of the program's line that has started TensorFlow's runtime.

With several workers the runtime must know the cluster before it starts, and any dataset, tensor or
variable starts it.
"""

from __future__ import annotations

import linecache
import sys
from typing import Any

# Packages that a line of the user's program calls before TensorFlow starts.
_LIBRARIES = ("tensorflow", "keras", "tf_keras", "tfscale")
_CONTEXT = "tensorflow.python.eager.context"
_START = "ensure_initialized"

_line: str | None = None


def watch() -> None:
    """Record the line that starts TensorFlow from now on, if TensorFlow is imported already."""
    if _CONTEXT not in sys.modules or has_devices():
        return
    module = sys.modules[_CONTEXT]
    context, start = module.context(), module.context().ensure_initialized

    def noted() -> None:
        vars(context).pop(_START, None)
        if not context._initialized:
            _note(sys._getframe(1))
        start()

    vars(context)[_START] = noted


def has_devices() -> bool:
    """Return whether TensorFlow's runtime has started, and made the devices of this process."""
    module = sys.modules.get(_CONTEXT)
    return module is not None and bool(module.context()._initialized)


def _note(frame: Any) -> None:
    global _line
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame = frame.f_back
    if frame:
        file, number = frame.f_code.co_filename, frame.f_lineno
        code = linecache.getline(file, number, frame.f_globals).strip()
        _line = f"{file}, line {number}" + (f": {code}" if code else "")


def words() -> str:
    """Return what has started TensorFlow, as the end of a sentence about it."""
    return "by a dataset, a tensor or a model" if _line is None else f"by {_line}"
