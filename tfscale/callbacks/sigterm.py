"""Detection of SIGTERM, in whatever thread a training runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from tfscale.bridge import fit
from tfscale.native import library
from tfscale.support import signals

_TIMES, _BETWEEN = 5, 0.1  # seconds
_BETWEEN_CHECKS = 1.0  # seconds, after a signal: has ``fit`` raised instead of reacting?


class Sigterm:
    """A receiver of SIGTERM, instead of the former handler, from now until ``stop``.

    If several trainings run at once, or one within another, each receives the signal.

    Keras does not tell callbacks that ``fit`` has raised. If a signal comes after that, and no
    other training runs, it is passed on to its former handler.

    Args:
        callback: the callback of the ``fit`` that listens.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        # A loop of the user may go on after an error, so it counts as running.
        self._fit = fit.running_with(callback)
        self.got_it = False
        _process.add(self)

    @property
    def heard(self) -> bool:
        """Whether the signal has come."""
        _process.read()
        return self.got_it

    def stop(self) -> None:
        """Leave the signal to its former handler; ``heard`` keeps its value.

        A signal that has come until now counts as handled.
        """
        _process.remove(self)
        if self.got_it:
            _process.unheeded = False

    def replaces(self, other: Sigterm) -> bool:
        """Return whether this belongs to another ``fit`` with the same callback."""
        return self._callback is other._callback

    def fit_is_over(self) -> bool:
        """Return whether ``fit`` has ended.

        Looks several times: a function that returns during a look hides its callers.
        """
        for _ in range(_TIMES):
            if self._fit is None or self._fit.goes_on():
                return False
            time.sleep(_BETWEEN)
        return True


class _Process:
    """The process's handling of SIGTERM, for all of its trainings.

    The handler writes into a pipe. In the main thread it is a Python handler, whose C part runs in
    whichever thread the system interrupts, including TensorFlow's. Other threads cannot set a
    Python handler: they use the native library's.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._trainings: list[Sigterm] = []
        self.unheeded = False  # whether a signal has come that no training has handled yet
        self._pipe: signals.Pipe | None = None  # exists from the first training on
        self._handles = False  # whether a Python handler is installed
        self._former: Any = signal.SIG_DFL
        self._action: Any = None  # C's former handler, while this handles the signal

    def add(self, training: Sigterm) -> None:
        self._remove_ended()
        with self._lock:
            if self._pipe is None:
                self._pipe = signals.Pipe()
                self._pipe.start(self._watch, "tfscale-sigterm")
            self._replace(training)
            self._take()

    def _replace(self, training: Sigterm) -> None:
        """Replace a former ``fit`` with the same callback, which can only have raised."""
        self.read()
        for other in [one for one in self._trainings if training.replaces(one)]:
            self._trainings.remove(other)
            training.got_it = other.got_it and self.unheeded
        self._trainings.append(training)

    def remove(self, training: Sigterm) -> bool:
        """Remove a training; return whether it was listening."""
        with self._lock:
            if training not in self._trainings:
                return False
            if len(self._trainings) == 1:
                self._give_back()
            self.read()
            self._trainings.remove(training)
            return True

    def read(self) -> None:
        with self._lock:
            if self._pipe and self._pipe.read():
                self.unheeded = True
                for training in self._trainings:
                    training.got_it = True

    def forget(self) -> None:
        """Drop all trainings in a forked process, since they belong to its parent."""
        if self._pipe:
            self._give_back()
            self._trainings.clear()
            self._pipe.close()

    def _take(self) -> None:
        assert self._pipe
        if self._handles:
            return
        if threading.current_thread() is not threading.main_thread():
            if self._action is None:
                writer = library.signal_writer(self._pipe.writer)
                self._action = signals.current(signal.SIGTERM)
                signals.install(signal.SIGTERM, writer)
            return
        if self._action is None:
            self._action = signals.current(signal.SIGTERM)
        former = signal.signal(signal.SIGTERM, self._hear)
        if former != self._hear:
            self._former = former
        self._handles = True

    def _give_back(self) -> None:
        """Restore the former signals.

        Threads other than the main one restore the C handler only, and ``_hear`` does the rest.
        """
        is_main = threading.current_thread() is threading.main_thread()
        replaced = self._handles and signal.getsignal(signal.SIGTERM) != self._hear
        if self._handles and is_main and not replaced:
            signal.signal(signal.SIGTERM, self._former)
        if self._action is not None and not replaced:
            signals.restore(signal.SIGTERM, self._action)
        self._handles, self._action = False, None

    def _hear(self, number: int, frame: Any) -> None:
        """Note the signal. Takes no lock, since it may interrupt the thread that holds it."""
        if self._trainings and self._pipe:
            self._pipe.write(number)
        else:
            signal.signal(signal.SIGTERM, self._former)
            os.kill(os.getpid(), signal.SIGTERM)

    def _watch(self) -> None:
        assert self._pipe
        while True:
            some_got_it = any(training.got_it for training in self._trainings)
            self._pipe.wait(_BETWEEN_CHECKS if some_got_it else None)
            self.read()
            self._remove_ended()

    def _remove_ended(self) -> None:
        """Remove ended trainings, and pass an unhandled signal to the former handler."""
        for training in list(self._trainings):
            was_last = training.fit_is_over() and self.remove(training) and not self._trainings
            if was_last and self.unheeded:
                self.unheeded = False
                os.kill(os.getpid(), signal.SIGTERM)


def _in_child() -> None:
    """Reset a forked process: it has nothing to save (it loads data, say), and ends by SIGTERM."""
    global _process
    _process.forget()
    _process = _Process()


_process = _Process()
signals.forget_in_child(_in_child)
