"""Notices SIGTERM, in whatever thread a training runs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from typing import Any

_TIMES, _BETWEEN = 5, 0.1  # seconds
_EACH = 1.0  # seconds, after a signal, to look whether ``fit`` has raised rather than heeded it


class Sigterm:
    """Takes SIGTERM from its former handler, from when this is made until ``stop``.

    Python's own handlers can only be set in the main thread, and run only when it runs Python
    code. ``faulthandler`` has neither limit: when the signal comes it writes a traceback, here
    into a pipe, which is not empty from then on.

    Keras does not tell callbacks that ``fit`` has raised. If a signal comes after that, this
    passes it on to its former handler.

    Args:
        callback: the callback whose ``fit`` this is for.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._heard = False
        self._listens = True
        self._lock = threading.Lock()
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)  # a full pipe has been heard already
        faulthandler.register(signal.SIGTERM, self._in, all_threads=False, chain=False)
        self._watches = self._fit_runs()  # and no loop of the user's own, which may go on
        if self._watches:
            threading.Thread(target=self._watch, name="tfscale-sigterm", daemon=True).start()

    @property
    def heard(self) -> bool:
        """Whether the signal has come."""
        with self._lock:
            if self._listens:
                self._read()
            return self._heard

    def stop(self) -> bool:
        """Give the signal back to its former handler; ``heard`` keeps what has come so far.

        Returns:
            Whether this took the signal until now.
        """
        with self._lock:
            if not self._listens:
                return False
            faulthandler.unregister(signal.SIGTERM)
            self._read()
            self._listens = False
            if self._watches:
                os.close(self._in)  # which ends the watch
            else:
                self._close()
            return True

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._heard |= bool(os.read(self._out, 1 << 16))

    def _close(self) -> None:
        os.close(self._in)
        os.close(self._out)

    def _watch(self) -> None:
        while True:
            select.select([self._out], [], [], _EACH if self._heard else None)
            with self._lock:
                if not self._listens:
                    return os.close(self._out)
                self._read()
            if self._heard and self._fit_is_over() and self.stop():
                os.kill(os.getpid(), signal.SIGTERM)

    def _fit_is_over(self) -> bool:
        """Looks several times: a function that returns during a look hides its callers."""
        for _ in range(_TIMES):
            if self._fit_runs():
                return False
            time.sleep(_BETWEEN)
        return True

    def _fit_runs(self) -> bool:
        """In any thread."""
        for frame in sys._current_frames().values():
            caller: Any = frame
            while caller is not None:
                if caller.f_code.co_name == "fit":
                    theirs = getattr(caller.f_locals.get("callbacks"), "callbacks", ())
                    if any(one is self._callback for one in theirs):
                        return True
                caller = caller.f_back
        return False
