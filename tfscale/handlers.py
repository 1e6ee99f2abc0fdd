"""Handlers of signals as C sees them: any thread may look at them, replace them and restore them.

Python lets its main thread alone do so, and does not know handlers that C has set.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable

Action = ctypes.Array  # what sigaction(2) tells of a handler; longer than any system's
_LENGTH = 1024  # bytes

_libc = ctypes.CDLL(None, use_errno=True)
_libc.signal.argtypes, _libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p


def current(number: int) -> Action[ctypes.c_char]:
    """What C does with a signal now: for ``restore``."""
    action = ctypes.create_string_buffer(_LENGTH)
    _libc.sigaction(number, None, action)
    return action


def restore(number: int, action: Action[ctypes.c_char]) -> None:
    """Let C do with a signal what it did before."""
    _libc.sigaction(number, action, None)


def install(number: int, address: int) -> None:
    """Have C call the function at this address, or one of ``signal.SIG_DFL`` and ``SIG_IGN``."""
    _libc.signal(number, address)


def forget_in_child(forget: Callable[[], None]) -> None:
    """Have a forked process call ``forget``. No SIGTERM reaches it before that.

    Such a process may be ended at once, as Keras does with those that load data, and must not tell
    this one's handlers.
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
