"""Ends TensorFlow's collectives as soon as a rank is lost, and names that rank.

The engine names a rank that is lost before a collective begins, without this module. But TensorFlow
would wait forever for a rank that is lost during a collective. The engine notices at once that
another process has ended, even while none of the engine's own collectives runs.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence

import tensorflow as tf

from tfscale.bridge.runtime import context
from tfscale.native import Communicator
from tfscale.native.library import told_by_others

_EVERY = 0.2  # seconds between two checks
_APART = 3.0  # seconds that may pass between the regular exits of two ranks
_SOON = 1.0  # seconds after which the engine, too, has noticed a loss that TensorFlow knows

_watching: list[LostRanks] = []


class LostRanks(threading.Thread):
    """Thread that watches for lost ranks until the process ends.

    Args:
        communicators: communicators of this process's ranks.
    """

    def __init__(self, communicators: Sequence[Communicator]) -> None:
        super().__init__(name="tfscale watches for lost ranks", daemon=True)
        self._communicators = communicators
        self._over = threading.Event()
        _watching.append(self)
        atexit.register(self._leave)

    def run(self) -> None:
        """Watch for lost ranks. Python calls this method in the new thread."""
        while not self._over.wait(_EVERY):
            code, why = self.heard()
            if code:
                self._end_all(code, why)
                return

    def heard(self) -> tuple[int, str]:
        """Return an error code, 0 if no rank is lost, and a text: which rank is lost, and why."""
        all_heard = (communicator.watch() for communicator in self._communicators)
        return next((each for each in all_heard if each[0]), (0, ""))

    def _end_all(self, code: int, why: str) -> None:
        has_left = code == tf.errors.UNAVAILABLE  # without a reason
        if not (has_left and self._over.wait(_APART)):
            end_collectives(code, why)

    def _leave(self) -> None:
        self._over.set()
        self.join()  # TensorFlow must not end before this thread


def end_collectives(code: int, why: str) -> None:
    """End TensorFlow's collectives in this process, including those of later steps."""
    told_by_others.add(why)
    context().abort_collective_ops(code, why)


def cause_of(error: BaseException) -> str:
    """Return which rank is lost, if that may explain an error of TensorFlow's collectives.

    Return an empty text otherwise. TensorFlow may notice a lost connection before the engine does,
    and does not name the rank; so this function waits up to a second for the engine.
    """
    if not isinstance(error, tf.errors.UnavailableError):
        return ""
    until = time.monotonic() + _SOON
    while _watching and time.monotonic() < until:
        for each in _watching:
            code, why = each.heard()
            if code:
                return why
        time.sleep(_EVERY / 10)
    return ""
