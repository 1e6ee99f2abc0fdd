"""Signal handlers at C's level: any thread may read, replace and restore them.

Python allows only its main thread to do so, and does not know handlers that C code has set.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable

Action = ctypes.Array  # a struct sigaction, longer than any system's
_LENGTH = 1024  # bytes

_libc = ctypes.CDLL(None, use_errno=True)
_libc.signal.argtypes, _libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p


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
    for forget in _forget:
        forget()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
