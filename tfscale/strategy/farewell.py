"""A worker that fails between two exchanges, or whose program ends, tells the others.

Without that message, the others would only see, seconds later, that its connection is
closed, and not why: Python takes its time to end a program that has loaded TensorFlow. If an
exchange itself raised the error, all workers that take part in it have it already; those of other
groups of replicas are told.
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
from tfscale.ops import Group
from tfscale.ops.library import known_to_all

LINGER = 3.0  # seconds to stay, at the longest, until all have heard of a failure
_LINGER_AT_EXIT = 0.5  # and of an end: over gRPC, workers that need nothing more do not listen

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_groups: list[Group] = []  # of all strategies of this process
_wider: list[Group] = []  # those of them that have parts, in which something may fail alone
_OUR_WORDS = re.compile(r"(?:bucket '|rank \d+ \().*")  # in an error of TensorFlow's


def when_the_program_ends(groups: Sequence[Group], within: Sequence[Group] = ()) -> None:
    """Tell all ranks of these groups how the program ends, or of an exception that nobody caught.

    The program's own ``sys.excepthook`` still prints the exception.

    Args:
        groups: to whom it is told.
        within: groups of which these are parts: what fails in a part is told to them, too.
    """
    if not _groups:
        end = _End()
        sys.excepthook = _told_by(sys.excepthook, end)
        sys.exit = end.noticed(sys.exit)
        atexit.register(end.tell)
    _groups.extend(groups)
    _wider.extend(within)


class _End:
    """How this process's program ends.

    Python does not tell the exit code before it has taken everything down. So this notices calls
    of ``sys.exit``, whose SystemExit the program may have caught: then its first frame returns.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._first = first_frame()
        self._calls: list[Any] = []  # the arguments of ``sys.exit``
        self.is_told = False

    def noticed(self, leave: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @functools.wraps(leave)
        def noticed(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():
                self._calls.append(status)
            leave(status)

        return noticed

    def tell(self) -> None:
        """Called by Python before it takes anything down."""
        if not self.is_told and self._process == os.getpid():  # a forked process is no worker
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


def _told_by(before: Hook, end: _End) -> Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        end.is_told = True
        before(kind, error, trace)
        lost = cause_of(error)  # the others hear of that rank, too
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
    """``tfscale launch`` shows who failed first: this worker failed since another had."""
    if path := os.environ.get("TFSCALE_NOT_FIRST"):
        with contextlib.suppress(OSError):
            Path(path).touch()


def say(reason: str, groups: Sequence[Group] | None = None) -> None:
    """Give up in these groups, or in all, at once: the others may wait in any one of them."""
    groups = _groups if groups is None else groups

    def one(group: Group) -> None:
        with contextlib.suppress(tf.errors.OpError):  # they are gone: there is nobody to tell
            group.give_up(reason, LINGER)

    with concurrent.futures.ThreadPoolExecutor(max(1, len(groups))) as threads:
        list(threads.map(one, groups))


def _announce_exit(reason: str) -> None:
    """One group after the other: Python starts no threads any more."""
    until = time.monotonic() + _LINGER_AT_EXIT
    for communicator in (each for group in _groups for each in group.communicators):
        with contextlib.suppress(tf.errors.OpError):
            communicator.announce_exit(reason, max(0.0, until - time.monotonic()))
