"""A worker that fails between two exchanges says so before it ends.

Without it the others would learn that its connection is closed, seconds later and
without a reason. An error that an exchange itself has raised all have heard of.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import tensorflow as tf

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
        if not known_to_all(error):
            say(f"its program failed: {kind.__name__}: {error}")

    return hook


def say(reason: str) -> None:
    """Give up in all groups at once: the others wait in one of them, nobody knows which."""

    def one(group: Group) -> None:
        with contextlib.suppress(tf.errors.OpError):  # they are gone: there is nobody to tell
            group.give_up(reason, LINGER)

    with concurrent.futures.ThreadPoolExecutor(max(1, len(_groups))) as threads:
        list(threads.map(one, _groups))
