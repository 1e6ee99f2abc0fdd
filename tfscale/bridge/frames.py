"""Calls that are going on, whichever program makes them; needs no TensorFlow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from tfscale.bridge import hooks


def frames(innermost: FrameType | None) -> Iterator[FrameType]:
    """Yield all calls that are going on, from the innermost, without those that hooks make."""
    while innermost is not None:
        if innermost.f_code.co_filename != hooks.__file__:
            yield innermost
        innermost = innermost.f_back


def first_frame() -> FrameType:
    """Return the outermost call of this thread, which is the program itself in the main thread."""
    *_, first = frames(sys._getframe())
    return first


def objects_in(error: BaseException, kind: type | tuple[type, ...]) -> list[Any]:
    """Return the objects of a kind whose methods an error went through, from outside to inside."""
    trace, found = error.__traceback__, []
    while trace is not None:
        one = trace.tb_frame.f_locals.get("self")
        if isinstance(one, kind):
            found.append(one)
        trace = trace.tb_next
    return found


def threads() -> list[Iterator[FrameType]]:
    """Return the calls of each thread of this process."""
    return [frames(innermost) for innermost in sys._current_frames().values()]
