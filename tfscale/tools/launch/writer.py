"""Writing in a separate thread: a slow reader must not stop the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import stat
import sys
import threading
from collections.abc import Sequence
from typing import TextIO

_WAITING = 256  # pieces that may wait to be written
_LOOK = 0.02  # seconds
_LOOK_AT_READER = 0.2

Pieces = Sequence[tuple[TextIO, str]]


class Writer:
    """A queue of text to write, and its thread.

    Once nobody can read any more, nothing more is written: ``room`` raises an error for a closed
    pipe, but not for a terminal that is gone.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[Pieces] = queue.Queue()
        self._closed = False  # the reader of the pipe has ended
        self._gone = False  # the terminal is gone
        self._hurries = False
        threading.Thread(target=self._run, name="tfscale-writer", daemon=True).start()

    def put(self, pieces: Pieces) -> None:
        """Write pieces, in this order, as soon as possible."""
        if not self._hurries:
            self._queue.put(pieces)

    def hurry(self) -> None:
        """Stop waiting until all is written."""
        self._hurries = True

    async def room(self) -> None:
        """Wait until little is left to write; raise ``BrokenPipeError`` if nobody will read it."""
        while self._queue.unfinished_tasks > _WAITING and not (self._closed or self._hurries):
            await asyncio.sleep(_LOOK)
        if self._closed:
            raise BrokenPipeError

    async def reader_ended(self) -> None:
        """Wait until the reader of the output's pipe has ended, though nothing is written."""
        while not self._closed:
            await asyncio.sleep(_LOOK_AT_READER)
            self._closed = self._closed or _reader_has_ended(sys.stdout)

    async def all_written(self) -> None:
        """Wait until nothing is left to write, unless ``hurry`` was called."""
        while self._queue.unfinished_tasks and not (self._closed or self._hurries):
            await asyncio.sleep(_LOOK)

    def leave(self, status: int) -> None:
        """End the process if a write still waits: Python itself would wait for the write."""
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
            write_at_once(pieces)
        except BrokenPipeError:
            self._closed = True
        except OSError:
            self._gone = True


def _reader_has_ended(stream: TextIO) -> bool:
    try:
        descriptor = stream.fileno()
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return False
    except (AttributeError, OSError, ValueError):  # closed, or a replacement without a file
        return False
    poll = select.poll()
    poll.register(descriptor, 0)  # errors alone
    return any(event & select.POLLERR for _, event in poll.poll(0))


def write_at_once(pieces: Pieces) -> None:
    """Write pieces in the caller's own thread."""
    for stream, text in pieces:
        stream.write(text)
        stream.flush()


def replace_what_cannot_be_shown(*streams: TextIO) -> None:
    """Replace characters that a terminal's encoding lacks; otherwise one would end the training."""
    for stream in streams:
        with contextlib.suppress(AttributeError):  # a replacement by a test or a notebook
            stream.reconfigure(errors="replace")  # type: ignore[attr-defined]
