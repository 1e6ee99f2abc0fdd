"""Supervision, from a second process, of a wait in which this process runs no Python code.

While TensorFlow's servers connect to each other no Python thread runs, and nothing ends the wait.
If a worker ended during that time, the others would wait forever.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfscale.cluster import meeting
from tfscale.cluster.greeting import Worker

_log = logging.getLogger("tfscale")


@contextlib.contextmanager
def watched(workers: Sequence[Worker], me: int, seconds: float) -> Iterator[None]:
    """Log now and then that this worker waits, and end its process after this number of seconds."""
    folder = str(Path(__file__).parents[2])
    path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    program = f"from tfscale.cluster import watch; watch.watch({os.getpid()})"
    told = [workers, me, seconds, meeting.FIRST_WORD, meeting.EACH]
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # continue without the second process if it cannot start
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                bufsize=0,
            )
            assert process.stdin is not None
            stack.callback(process.wait)
            stack.callback(process.kill)
            stack.callback(process.stdin.close)
            process.stdin.write(json.dumps(told).encode() + b"\n")
        yield


def watch(process: int) -> None:
    """Watch in the second process until its input ends: when the wait or the worker ends."""
    listed, me, seconds, word, each = json.loads(sys.stdin.readline())
    workers = [Worker(*worker) for worker in listed]
    who = f"{workers[me]} has met all others and waited %.0f s for their servers (%s)"
    began = time.monotonic()
    while not select.select([sys.stdin], [], [], max(0, min(word, seconds) + began - _now()))[0]:
        others = [worker for i, worker in enumerate(workers) if i != me]
        story = who % (_now() - began, meeting.unreachable(others))
        if _now() - began >= seconds:
            _log.info("%s. This process ends now (join_timeout)", story)
            os.kill(process, signal.SIGKILL)  # a waiting process reacts to nothing else
            return
        _log.info("%s", story)
        word += each


def _now() -> float:
    return time.monotonic()
