"""Hears SIGTERM, in whatever thread a training runs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal


class Sigterm:
    """Takes SIGTERM in place of whoever took it before, from when this is made until ``stop``.

    Python's own handlers can be set in the main thread alone, and wait there until it gives way.
    ``faulthandler`` has neither limit: it writes a traceback when the signal comes, here into a
    pipe, which is not empty from then on.
    """

    def __init__(self) -> None:
        self._heard = False
        self._listens = True
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)  # a full pipe has been heard already
        faulthandler.register(signal.SIGTERM, self._in, all_threads=True, chain=False)

    @property
    def heard(self) -> bool:
        """Whether the signal has come."""
        if self._listens:
            with contextlib.suppress(BlockingIOError):
                self._heard |= bool(os.read(self._out, 1 << 16))
        return self._heard

    def stop(self) -> None:
        """Leave the signal to whoever took it before; what has come so far is known."""
        if self._listens:
            faulthandler.unregister(signal.SIGTERM)
            self._heard = self.heard
            self._listens = False
            os.close(self._out)
            os.close(self._in)
