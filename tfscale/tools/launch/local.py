"""Several worker processes on one machine, as one cluster.

All processes end with the `with` block, and every wait has a time limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tfscale.cluster.addresses import held_ports
from tfscale.cluster.sources import ONLY_TF_CONFIG
from tfscale.support import arguments
from tfscale.tools.launch import endings

WATCH_SECONDS = 0.2


_MOST = 1024  # largest number of workers on one machine


class WorkerFailed(RuntimeError):
    """Raised if a worker fails or does not end; the message shows the end of its output."""


def _words(value: Sequence[str], name: str) -> tuple[str, ...]:
    return arguments.items(value, name, "a list of words", _word, least=0)


def _word(value: str | os.PathLike[str], name: str) -> str:
    return arguments.text(os.fspath(value) if isinstance(value, os.PathLike) else value, name)


def _variables(value: Mapping[str, str], name: str) -> dict[str, str]:
    found = arguments.mapping(value, name, "a mapping from names of variables to texts")
    for key, each in found.items():
        arguments.text(key, f"a key of {name}")
        if not isinstance(each, str):
            raise arguments.wrong(each, f"{name}[{key!r}]", "a text")
    return found


class LocalWorkers:
    """A command that runs in several processes, each with its own ``TF_CONFIG``.

    Args:
        command: the command of all processes; ``TF_CONFIG`` tells each which worker it is.
        count: number of processes.
        hosts: an address for each; all on the loopback by default.
        prefixes: words to put before each worker's command (``ip netns exec ...``).
        environment: variables in addition to this process's own.
        environments: more variables, for each.

    Example:
        >>> import sys
        >>> with LocalWorkers([sys.executable, "-c", "print('trained')"], 2) as workers:
        ...     printed = workers.wait(60)
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        hosts: Sequence[str] | None = None,
        prefixes: Sequence[Sequence[str]] | None = None,
        environment: Mapping[str, str] | None = None,
        environments: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        command = arguments.items(command, "command", "a list of words", _word)
        count = arguments.whole(count, "count", 1, _MOST, what="a number of workers")
        lists: dict[str, tuple[Any, Callable[[Any, str], Any]]] = {
            "hosts": (hosts, _word),
            "prefixes": (prefixes, _words),
            "environments": (environments, _variables),
        }
        for name, (each, item) in lists.items():
            expected = "a list with an entry for each worker"
            arguments.optional(arguments.items, each, name, expected, item, least=count, most=count)
        arguments.optional(_variables, environment, "environment")
        self._logs = tempfile.TemporaryDirectory(prefix="tfscale-workers-")
        self._ports = held_ports(count)
        ports = [each.getsockname()[1] for each in self._ports]
        addresses = [
            f"{host}:{port}"
            for host, port in zip(hosts or ["127.0.0.1"] * count, ports, strict=True)
        ]
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for index in range(count):
                prefix = prefixes[index] if prefixes else []
                variables = {
                    **os.environ,
                    **cluster_environment(addresses, index),
                    **(environment or {}),
                    **(environments[index] if environments else {}),
                }
                with open(self._log(index), "wb") as log:
                    process = self._start(index, [*prefix, *command], variables, log)
                self.processes.append(process)
        except BaseException:
            self._end()
            raise

    def _start(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def _log(self, index: int) -> Path:
        return Path(self._logs.name) / f"worker-{index}.log"

    def output(self, index: int) -> str:
        """Return the output of a worker so far."""
        return self._log(index).read_text(errors="replace")

    def signal(self, index: int, number: signal.Signals) -> None:
        """Send a signal to a worker and to all processes that it started."""
        os.killpg(self.processes[index].pid, number)

    def wait(
        self,
        seconds: float,
        only: Sequence[int] | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Wait for workers to succeed; return all outputs, or raise ``WorkerFailed``.

        Args:
            seconds: a worker that still runs after this number of seconds has failed.
            only: the workers to wait for; all by default.
            watch: called a few times a second meanwhile.
        """
        seconds = arguments.seconds(seconds, "seconds", least=0)
        indices = range(len(self.processes)) if only is None else only
        end = time.monotonic() + seconds
        watched = 0.0
        while any(self.processes[i].poll() is None for i in indices):
            failed = [i for i in indices if self.processes[i].poll()]
            if failed:
                time.sleep(1)  # the others may still print something
                break
            if time.monotonic() > end:
                break
            if time.monotonic() - watched > WATCH_SECONDS:
                watch()
                watched = time.monotonic()
            time.sleep(0.02)
        for index in sorted(
            indices, key=lambda i: not self.processes[i].poll()
        ):  # failed ones first
            self._check(index, seconds)
        return [self.output(i) for i in range(len(self.processes))]

    def _check(self, index: int, seconds: float) -> None:
        code = self.processes[index].poll()
        if code == 0:
            return
        codes = ", ".join(str(p.poll()) for p in self.processes)
        what = f"still runs after {seconds:.0f} s" if code is None else endings.describe(code)
        raise WorkerFailed(
            f"worker {index} of {len(self.processes)} {what} (all: {codes}). "
            f"The end of its output:\n{self.output(index)[-4000:]}"
        )

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for index in range(len(self.processes)):
            with contextlib.suppress(ProcessLookupError):
                self.signal(index, signal.SIGKILL)
        for process in self.processes:
            process.wait(60)  # all are killed first: a machine may be slow to end one
        for port in self._ports:
            port.close()
        self._logs.cleanup()


def cluster_environment(addresses: Sequence[str], index: int) -> dict[str, str]:
    """Return variables that tell a worker the cluster and its place in it; its port is held."""
    task = {"type": "worker", "index": index}
    config = {"cluster": {"worker": list(addresses)}, "task": task}
    return {
        "TF_CONFIG": json.dumps(config),
        ONLY_TF_CONFIG: "1",
        "TF_GRPC_REUSE_PORT": "1",
    }
