"""A worker that fails between two exchanges tells the others before it ends.

Without that message, the others would only see, seconds later, that its connection is
closed, and not why. If an exchange itself raised the error, all workers have it already.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import tensorflow as tf

from tfscale.exchange.lost_ranks import cause_of
from tfscale.ops import Group
from tfscale.ops.library import known_to_all

LINGER = 3.0  # seconds to stay, at the longest, until all have heard

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_groups: list[Group] = []  # of all strategies of this process


def when_the_program_fails(groups: Sequence[Group]) -> None:
    """Tell all ranks of these groups of an exception that nobody has caught.

    The program's own ``sys.excepthook`` still prints it.
    """
    if not _groups:
        sys.excepthook = _told_by(sys.excepthook)
    _groups.extend(groups)


def _told_by(before: Hook) -> Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        lost = cause_of(error)  # the others hear of that rank, too
        if lost or known_to_all(error):
            _mark_as_not_first()
        if known_to_all(error):
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


def say(reason: str) -> None:
    """Give up in all groups at once, since the others may wait in any one of them."""

    def one(group: Group) -> None:
        with contextlib.suppress(tf.errors.OpError):  # they are gone: there is nobody to tell
            group.give_up(reason, LINGER)

    with concurrent.futures.ThreadPoolExecutor(max(1, len(_groups))) as threads:
        list(threads.map(one, _groups))
