"""Running coroutines in programs without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_LONGEST_END = 5.0  # seconds that a cancelled coroutine gets to end


def run_in_thread(doing: Coroutine[Any, Any, _T], name: str) -> _T:
    """Run a coroutine in its own thread, and return its outcome.

    A notebook's thread already has an event loop, and must be free to receive Ctrl-C, which cancels
    the coroutine.
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
        with contextlib.suppress(RuntimeError):  # the loop has ended
            for each in cancel:
                each()
        thread.join(_LONGEST_END)
