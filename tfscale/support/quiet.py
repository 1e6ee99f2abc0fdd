"""Silence for libraries of C++ that print to stdout."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

_LOCK = threading.Lock()


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Discard what libraries print to the process's stdout while the block runs.

    ``contextlib.redirect_stdout`` replaces Python's stream only, and a library's ``printf`` writes
    to the file descriptor. C's stream has a buffer of its own, which is flushed before the
    descriptor changes and before it changes back.
    """
    with _LOCK:
        flush_c = ctypes.CDLL(None).fflush
        with contextlib.suppress(AttributeError, ValueError, OSError):
            sys.stdout.flush()
        flush_c(None)
        try:
            kept = os.dup(1)
        except OSError:  # the process has no stdout
            yield
            return
        try:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            yield
        finally:
            flush_c(None)
            os.dup2(kept, 1)
            os.close(kept)
