"""Messages to the other workers when this worker fails between exchanges, or its program ends.

Without such a message, the other workers would only see that the connection is closed. They would
see it seconds later, because Python is slow to end a program that has loaded TensorFlow, and they
would not know the reason. If an exchange raised the error, all workers of this exchange know it
already: only the other groups of replicas get a message.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dis
import functools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import tensorflow as tf

from tfscale.bridge.frames import first_frame
from tfscale.exchange.lost_ranks import cause_of
from tfscale.native import Group
from tfscale.native.library import known_to_all

LINGER = 3.0  # most seconds to wait until all workers have received the message of a failure
# Most seconds to wait after the end of a program: over gRPC, idle workers do not receive messages.
_LINGER_AT_EXIT = 0.5

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_groups: list[Group] = []  # groups of all strategies of this process
_wider: list[Group] = []  # the groups that are divided into parts, which can fail separately
_OUR_WORDS = re.compile(r"(?:bucket '|rank \d+ \().*")  # tfscale's part of a TensorFlow error


def announce(groups: Sequence[Group], within: Sequence[Group] = ()) -> None:
    """Tell all ranks of these groups how the program ends, or which uncaught exception ended it.

    The program's own ``sys.excepthook`` still prints the exception.

    Args:
        groups: groups whose ranks get the message.
        within: groups that contain ``groups``; they get a message of a failed exchange, too.
    """
    if not _groups:
        end = _End()
        sys.excepthook = _announcing_error(sys.excepthook, end)
        sys.exit = end.noticed(sys.exit)
        atexit.register(end.announce_exit)
    _groups.extend(groups)
    _wider.extend(each for each in within if each not in _wider)


class _End:
    """Observer of how this process's program ends.

    Python does not reveal the exit code while the program can still send messages. So this class
    records the calls of ``sys.exit``. If the program caught their SystemExit, its first frame has
    returned.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._first = first_frame()
        self._calls: list[Any] = []  # arguments of ``sys.exit``
        self.is_announced = False

    def noticed(self, leave: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @functools.wraps(leave)
        def noticed(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():
                self._calls.append(status)
            leave(status)

        return noticed

    def announce_exit(self) -> None:
        """Announce how the program ends; Python calls this before it shuts down."""
        if not self.is_announced and self._process == os.getpid():  # a forked process is no worker
            _announce_exit(self._words())

    def _words(self) -> str:
        if _has_returned(self._first):
            return "its program ended with exit code 0"
        if not self._calls:
            return "its program ended by SystemExit"
        *_, status = self._calls
        if status is None or isinstance(status, int):
            return f"its program ended with exit code {status or 0:d}"
        return f"its program ended with exit code 1: {status}"


def _has_returned(frame: FrameType) -> bool:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def _announcing_error(before: Hook, end: _End) -> Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        end.is_announced = True
        before(kind, error, trace)
        lost = cause_of(error)  # the other workers learn of that rank by themselves
        if lost or known_to_all(error):
            _mark_as_not_first()
        if known_to_all(error):
            words = _OUR_WORDS.search(str(error))
            say(f"its group failed: {words[0] if words else error}", _wider)
            return
        if lost:
            logging.getLogger("tfscale").error("%s", lost)
        else:
            say(f"its program failed: {kind.__name__}: {error}")

    return hook


def _mark_as_not_first() -> None:
    """Record for ``tfscale launch`` that this worker failed because another worker had failed.

    The launcher shows the worker that failed first.
    """
    if path := os.environ.get("TFSCALE_NOT_FIRST"):
        with contextlib.suppress(OSError):
            Path(path).touch()


def can_say() -> bool:
    """Return whether there is a group that would hear ``say``."""
    return bool(_groups)


def say(reason: str, groups: Sequence[Group] | None = None) -> None:
    """Give up in these groups, or in all groups, at once: workers may be waiting in any of them."""
    groups = _groups if groups is None else groups

    def one(group: Group) -> None:
        with contextlib.suppress(tf.errors.OpError):  # the other workers have ended
            group.give_up(reason, LINGER)

    with concurrent.futures.ThreadPoolExecutor(max(1, len(groups))) as threads:
        list(threads.map(one, groups))


def _announce_exit(reason: str) -> None:
    """Announce the end in one group after another: Python cannot start threads at exit."""
    until = time.monotonic() + _LINGER_AT_EXIT
    for communicator in (each for group in _groups for each in group.communicators):
        with contextlib.suppress(tf.errors.OpError):
            communicator.announce_exit(reason, max(0.0, until - time.monotonic()))
