"""Processes that begin with TensorFlow loaded, which spares each of them four seconds of work.

A parent process loads TensorFlow, Keras and tfscale, and forks a child for each process that a
test asks for. This is safe as long as the parent has not started TensorFlow's runtime: it lists
no devices and runs no op. A child is a process of its own, in a session of its own, which runs
its script as ``python script`` would: environment, arguments, ``__main__``, what happens at its
end, and its exit code are its own, and it can be killed and stopped.

    with warm.Workers([script, argument], 2, environment={...}) as workers:
        outputs = workers.wait(60)

    done = warm.run([script], cwd=folder)

``Workers`` is ``LocalWorkers`` whose command has no interpreter. Processes that are to show how
Python or TensorFlow are loaded, or that need other settings which TensorFlow reads when it is
loaded (``TF_ENABLE_ONEDNN_OPTS``), must not be warm: they start by ``sys.executable``, as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from tfscale.launch import LocalWorkers

PARENT = Path(__file__).resolve().parent / "warm_parent.py"
LONGEST = 1 << 20  # bytes of a request: an environment and a command
# What TensorFlow reads when it is loaded, and children cannot change any more: warnings are told.
SETTLED = {"TF_CPP_MIN_LOG_LEVEL": "1"}


class Parent:
    """The process whose children are warm, seen from the tests."""

    def __init__(self, hash_seed: int) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
            self._process = subprocess.Popen(
                [sys.executable, str(PARENT), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONHASHSEED": str(hash_seed), **SETTLED},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self._end)

    def _end(self) -> None:
        self._socket.close()  # at which it ends
        self._process.wait(60)  # so that its processor time counts as ours

    def ask(self, request: Mapping[str, Any], files: Sequence[int] = ()) -> Any:
        """Return the answer to a request; files go along with the request."""
        socket.send_fds(self._socket, [json.dumps(request).encode()], files)
        answer = self._socket.recv(LONGEST)
        assert answer, "the parent of warm processes has ended"
        return json.loads(answer)


@functools.cache
def parent(number: int) -> Parent:
    """One of two, which begin when they are needed.

    Their sets and dictionaries of strings are in different orders, as those of any two
    processes are: workers that come from both notice code that depends on such an order.
    """
    return Parent(hash_seed=1 + number)


class Process:
    """A warm process, with what tests use of ``subprocess.Popen``."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        cwd: str | Path | None = None,
        number: int = 0,
    ) -> None:
        self._parent = parent(number % 2)
        self.returncode: int | None = None
        request = {
            "command": list(command),
            "environment": dict(environment),
            "cwd": str(cwd or os.getcwd()),
        }
        self.pid: int = self._parent.ask(request, [output])

    def poll(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None before."""
        if self.returncode is None:
            self.returncode = self._parent.ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end, and return the exit code."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutExpired(f"warm process {self.pid}", timeout)
            time.sleep(0.01)
        return code


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    seconds: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run one script, or ``["-c", code]``, to its end; output and errors are in ``stdout``."""
    with tempfile.TemporaryFile() as output:
        process = Process(command, {**os.environ, **(environment or {})}, output.fileno(), cwd)
        try:
            code = process.wait(seconds)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
            raise
        output.seek(0)
        return subprocess.CompletedProcess(command, code, output.read().decode(errors="replace"))


class Workers(LocalWorkers):
    """``LocalWorkers`` whose processes are warm; the command is a script and its arguments."""

    def _start(self, index, command, environment, log):
        return Process(command, environment, log.fileno(), number=index)
