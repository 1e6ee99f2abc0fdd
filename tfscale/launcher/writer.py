"""Writes in a thread of its own: whoever reads slowly must not stop the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Sequence
from typing import TextIO

_WAITING = 256  # pieces that may wait to be written
_LOOK = 0.02  # seconds

Pieces = Sequence[tuple[TextIO, str]]


class Writer:
    """A queue of what is to be written, and its thread.

    Once nobody can read any more, nothing more is written: a pipe that was closed is an error that
    ``room`` raises, a terminal that is gone is none.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[Pieces] = queue.Queue()
        self._closed = False  # what reads the pipe has ended
        self._gone = False  # the terminal has
        self._hurries = False
        threading.Thread(target=self._run, name="tfscale-writer", daemon=True).start()

    def put(self, pieces: Pieces) -> None:
        """Write them, in this order, as soon as possible."""
        if not self._hurries:
            self._queue.put(pieces)

    def hurry(self) -> None:
        """Nobody wants to wait any more until all is written."""
        self._hurries = True

    async def room(self) -> None:
        """Wait until little is left to write; ``BrokenPipeError`` if nobody will read it."""
        while self._queue.unfinished_tasks > _WAITING and not (self._closed or self._hurries):
            await asyncio.sleep(_LOOK)
        if self._closed:
            raise BrokenPipeError

    async def all_written(self) -> None:
        """Wait until nothing is left to write, unless somebody is in a hurry."""
        while self._queue.unfinished_tasks and not (self._closed or self._hurries):
            await asyncio.sleep(_LOOK)

    def leave(self, status: int) -> None:
        """End the process if a write still waits: Python itself would wait for it at its end."""
        if self._queue.unfinished_tasks and not self._closed:
            os._exit(status)

    def _run(self) -> None:
        while True:
            self._write(self._queue.get())
            self._queue.task_done()

    def _write(self, pieces: Pieces) -> None:
        if self._closed or self._gone:
            return
        try:
            for stream, text in pieces:
                stream.write(text)
                stream.flush()
        except BrokenPipeError:
            self._closed = True
        except OSError:
            self._gone = True


def write_at_once(pieces: Pieces) -> None:
    """In the caller's own thread."""
    for stream, text in pieces:
        stream.write(text)
        stream.flush()


def replace_what_cannot_be_shown(*streams: TextIO) -> None:
    """Else one character that a terminal's encoding lacks would end the training."""
    for stream in streams:
        with contextlib.suppress(AttributeError):  # a stand-in of a test's or a notebook's
            stream.reconfigure(errors="replace")  # type: ignore[attr-defined]
