"""Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pause the collector in a block that makes very many objects, nearly all of which stay.

    The collector goes through all objects of the program whenever enough new ones were made, and
    would find next to nothing.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
