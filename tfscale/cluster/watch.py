"""Logs of long waits in TensorFlow, and their end.

While TensorFlow's servers connect to each other no Python thread runs, and nothing ends the wait.
If a worker ended during that time, the others would wait forever. So a second process watches.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfscale.cluster import addresses, gathering
from tfscale.cluster.meeting import Worker

_log = logging.getLogger("tfscale")


@contextlib.contextmanager
def log_waiting(text: str) -> Iterator[None]:
    """Log now and then what the code in this context is waiting for."""
    over = threading.Event()
    began = time.monotonic()

    def log() -> None:
        for seconds in gathering.log_times():
            if over.wait(began + seconds - time.monotonic()):
                return
            _log.warning("%s; %.0f s by now", text, seconds)

    threading.Thread(target=log, name="tfscale-narrator", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def describe_reachability(workers: Sequence[Worker]) -> str:
    """Describe which workers cannot be reached, and why."""
    troubles = []
    for worker in workers:
        try:
            socket.create_connection(addresses.split(worker.address), timeout=1.0).close()
        except OSError as error:
            troubles.append(f"{worker}: {addresses.describe_error(error)}")
    return "; ".join(troubles) or "all of their ports answer"


@contextlib.contextmanager
def watched(workers: Sequence[Worker], me: int, seconds: float) -> Iterator[None]:
    """Log now and then that this worker waits, and end its process after this number of seconds."""
    folder = str(Path(__file__).parents[2])
    path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    program = f"from tfscale.cluster import watch; watch.watch({os.getpid()})"
    job = [workers, me, seconds, list(gathering.log_times(seconds))]
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
            process.stdin.write(json.dumps(job).encode() + b"\n")
        yield


def watch(process: int) -> None:
    """Watch in the second process until its input ends: when the wait or the worker ends."""
    listed, me, timeout, times = json.loads(sys.stdin.readline())
    workers = [Worker(*worker) for worker in listed]
    others = [worker for worker in workers if worker != workers[me]]
    began = time.monotonic()
    for seconds in [*times, timeout]:
        left = began + seconds - time.monotonic()
        if select.select([sys.stdin], [], [], max(0, left))[0]:
            return
        waiting = (
            f"{workers[me]} has met all others and waited {time.monotonic() - began:.0f} s for "
            f"their servers ({describe_reachability(others)})"
        )
        if seconds < timeout:
            _log.info("%s", waiting)
    _log.info("%s. This process ends now (join_timeout)", waiting)
    os.kill(process, signal.SIGKILL)  # a waiting process reacts to nothing else
