"""Ends TensorFlow's collectives as soon as a rank is lost, and says which one.

Who is lost before one begins is named by the engine, and needs none of this. But who is lost within
one would be waited for forever. The engine hears of other processes at once, also while
none of its own collectives runs.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence

import tensorflow as tf

from tfscale.bridge.runtime import context
from tfscale.ops import Communicator
from tfscale.ops.library import told_by_others

_EVERY = 0.2  # seconds
_APART = 3.0  # seconds: ranks that are done may leave so long after each other
_SOON = 1.0  # seconds after which the engine has heard what TensorFlow knows

_watching: list[LostRanks] = []


class LostRanks(threading.Thread):
    """Watches until the process ends.

    Args:
        communicators: of this process's ranks.
    """

    def __init__(self, communicators: Sequence[Communicator]) -> None:
        super().__init__(name="tfscale watches for lost ranks", daemon=True)
        self._communicators = communicators
        self._over = threading.Event()
        _watching.append(self)
        atexit.register(self._leave)

    def run(self) -> None:
        """Called by Python."""
        while not self._over.wait(_EVERY):
            code, why = self.heard()
            if code:
                self._end_all(code, why)
                return

    def heard(self) -> tuple[int, str]:
        """The code of an error, 0 if all ranks are well; and who is lost and why."""
        all_heard = (communicator.watch() for communicator in self._communicators)
        return next((each for each in all_heard if each[0]), (0, ""))

    def _end_all(self, code: int, why: str) -> None:
        has_left = code == tf.errors.UNAVAILABLE  # and given no reason
        if not (has_left and self._over.wait(_APART)):
            end_collectives(code, why)

    def _leave(self) -> None:
        self._over.set()
        self.join()  # TensorFlow ends after it


def end_collectives(code: int, why: str) -> None:
    """End TensorFlow's collectives of this process, those of later steps as well."""
    told_by_others.add(why)
    context().abort_collective_ops(code, why)


def cause_of(error: BaseException) -> str:
    """Who is lost, if that may be why TensorFlow's collectives have failed; or an empty text.

    TensorFlow may miss a connection before we do, and does not say whose it was.
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
