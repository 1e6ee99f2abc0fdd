"""Hearing signals in whatever thread the system interrupts, without losing one.

A handler may interrupt any code, so it only writes the signal's number into a ``Pipe``; a thread
reads it. The handlers here are C's: any thread may read, replace and restore them. Python allows
only its main thread to do so, and does not know handlers that C code has set. A forked process
hears nothing that was meant for its parent: see ``forget_in_child``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable

Action = ctypes.Array  # a struct sigaction, longer than any system's
_LENGTH = 1024  # bytes

_libc = ctypes.CDLL(None, use_errno=True)
_libc.signal.argtypes, _libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p


class Pipe:
    """A pipe into which handlers write the numbers of signals.

    A handler never waits: a pipe that is full has been written to often enough.
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        for end in (self._reader, self.writer):
            os.set_blocking(end, False)

    def start(self, hear: Callable[[], None], name: str) -> None:
        """Start the thread that waits for signals and reads them."""
        threading.Thread(target=hear, name=name, daemon=True).start()

    def write(self, number: int) -> None:
        """Write a signal's number; a handler may call this wherever it interrupts."""
        with contextlib.suppress(BlockingIOError):
            os.write(self.writer, bytes([number]))

    def wait(self, seconds: float | None = None) -> None:
        """Wait for a signal, at most for these seconds."""
        select.select([self._reader], [], [], seconds)

    def read(self) -> bytes:
        """Return the numbers of the signals that have come since."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._reader, 1 << 16)
        return b""

    def close(self) -> None:
        """Close the pipe, in a forked process: its thread lives in the parent."""
        os.close(self._reader)
        os.close(self.writer)


def current(number: int) -> Action[ctypes.c_char]:
    """Return C's present handler of a signal, for ``restore``."""
    action = ctypes.create_string_buffer(_LENGTH)
    _libc.sigaction(number, None, action)
    return action


def restore(number: int, action: Action[ctypes.c_char]) -> None:
    """Restore C's former handler of a signal."""
    _libc.sigaction(number, action, None)


def install(number: int, address: int) -> None:
    """Install the C function at this address, or one of ``signal.SIG_DFL`` and ``SIG_IGN``."""
    _libc.signal(number, address)


def forget_in_child(forget: Callable[[], None]) -> None:
    """Let each forked process call ``forget``, before any SIGTERM reaches it.

    A forked process may be ended at once, as Keras does with processes that load data. Its SIGTERM
    must not reach this process's handlers.
    """
    _forget.append(forget)


_forget: list[Callable[[], None]] = []
_forks = threading.local()


def _before_fork() -> None:
    _forks.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forks.mask)


def _in_child() -> None:
    try:
        for forget in _forget:
            forget()
    finally:
        _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
