"""Coroutines for programs that know of none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_LONGEST_END = 5.0  # seconds that it gets to end once it is cancelled


def outcome_of(doing: Coroutine[Any, Any, _T], name: str) -> _T:
    """Run it in a thread of its own: a notebook's has an event loop already, and this one hears
    Ctrl-C, which cancels it.
    """
    outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()
    cancel: list[Callable[[], object]] = []

    async def cancellable() -> _T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
        return await doing

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(cancellable()))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        return outcome.result()
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended
            for each in cancel:
                each()
        thread.join(_LONGEST_END)
