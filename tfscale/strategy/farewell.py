"""A worker that fails between two exchanges tells the others before it ends.

Without that message, the others would only see, seconds later, that its connection is
closed, and not why. If an exchange itself raised the error, all workers that take part in it have
it already; those of other groups of replicas are told.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import re
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
_wider: list[Group] = []  # those of them that have parts, in which something may fail alone
_OUR_WORDS = re.compile(r"(?:bucket '|rank \d+ \().*")  # in an error of TensorFlow's


def when_the_program_fails(groups: Sequence[Group], within: Sequence[Group] = ()) -> None:
    """Tell all ranks of these groups of an exception that nobody has caught.

    The program's own ``sys.excepthook`` still prints it.

    Args:
        groups: to whom it is told.
        within: groups of which these are parts: what fails in a part is told to them, too.
    """
    if not _groups:
        sys.excepthook = _told_by(sys.excepthook)
    _groups.extend(groups)
    _wider.extend(within)


def _told_by(before: Hook) -> Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
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
