"""The supervisor: runs on each host, between the launcher and the host's workers.

If the launcher is killed or its connection is cut, nobody could end the workers. So each host has a
process that starts workers as ordered, reports their output and their end, and ends them all when
its input ends or is silent for too long. Workers end with it, too.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tfscale.cluster.addresses import held_ports
from tfscale.support.names import TIMELINE_VARIABLE
from tfscale.support.version import __version__
from tfscale.tools.launch import machine, processes, protocol

_LAST_OUTPUT = 1.0  # seconds to read the output of a worker's own children
_LOOK = 0.05  # seconds


def main() -> None:
    """Start the workers of this host as the launcher orders, until the launcher is gone."""
    # The launcher receives Ctrl-C and hang-ups, and decides what happens.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # If this process is stopped when the launcher ends, it continues, and ends its workers.
    processes.signal_when_parent_ends(signal.SIGCONT)
    processes.adopt_orphans()  # so that it finds all processes that workers leave behind
    try:
        asyncio.run(_Supervisor().run())
    finally:
        processes.kill_children()


class _Worker:
    """A process, in a group with all processes that it starts."""

    def __init__(self, process: subprocess.Popen[bytes], mark: Path) -> None:
        self.process = process
        self.mark = mark  # a file that it writes if it fails because another worker has failed
        self.over = asyncio.Event()
        self.gone = asyncio.Event()  # set when its whole group has ended
        self.left = _LAST_OUTPUT  # seconds to wait for other processes' output, once it is gone
        self.warned = -math.inf  # time when it got SIGTERM

    @property
    def runs(self) -> bool:
        return not self.over.is_set()

    def signal(self, number: int) -> None:
        if number == signal.SIGTERM:
            self.warned = time.monotonic()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def has_group(self) -> bool:
        """Return whether the worker, or a process of its group, still runs."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


class _Supervisor:
    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._grace = 10.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._look)
        orders = await _reader(sys.stdin.buffer)
        transport, flow = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, sys.stdout.buffer
        )
        self._out = asyncio.StreamWriter(transport, flow, None, loop)
        with tempfile.TemporaryDirectory(prefix="tfscale-launch-") as folder:
            self._folder = Path(folder)
            with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
                await self._obey(orders)
            await self._end()

    async def _obey(self, orders: asyncio.StreamReader) -> None:
        first = protocol.parsed(await protocol.read(orders))
        if first is None:
            return
        silence = first["silence"]
        self._grace = float(first["grace"])
        held = held_ports(int(first["ports"]), "127.0.0.1" if first["loopback"] else "")
        self._say(
            tfscale=__version__,
            protocol=protocol.PROTOCOL,
            host=socket.gethostname(),
            ports=[each.getsockname()[1] for each in held],
            connection=os.environ.get("SSH_CONNECTION", ""),
        )
        while data := await self._order(orders, silence):
            order = protocol.parsed(data) or {}
            if "start" in order:
                for one in order["start"]:
                    self._start(one, order)
            elif "signal" in order:
                self._signal(int(order["signal"]))
            elif "end" in order:
                self._spawn(self._end())

    async def _order(self, orders: asyncio.StreamReader, silence: float | None) -> bytes:
        try:
            return await asyncio.wait_for(protocol.read(orders), silence)
        except asyncio.TimeoutError:
            self._say(ends=f"it has not heard from the launcher for {silence:g} s (--silence)")
            raise

    def _say(self, **message: Any) -> None:
        self._out.write(protocol.line(message))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- workers

    def _start(self, one: dict[str, Any], order: dict[str, Any]) -> None:
        rank, mark = int(one["rank"]), self._folder / f"{one['rank']}.not-first"
        local, count = one["share"]
        given = {**order["environment"], **one["environment"]}
        environment = {**os.environ, **given, "TFSCALE_NOT_FIRST": str(mark)}
        if order["timeline"]:
            environment[TIMELINE_VARIABLE] = str(self._folder / f"timeline-{rank}.json")
        cores = machine.part(machine.cores(), local, count) if order["bind"] else None
        try:
            environment.pop("TFSCALE_LOGICAL_CPUS", None)  # set by a launcher that started this one
            shared = machine.shared(local, count, order["devices"], environment)
            process = subprocess.Popen(
                order["command"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=order["folder"],
                env={**environment, **shared},
                start_new_session=True,
                preexec_fn=functools.partial(_prepare, cores, os.getpid()),
            )
        except OSError as error:
            where = error.filename if isinstance(error.filename, str) else order["command"][0]
            self._say(rank=rank, ended=127, why=f"it cannot be started: {error.strerror}: {where}")
        except ValueError as error:
            self._say(rank=rank, ended=2, why=f"it cannot be started: {error}")
        else:
            self._workers[rank] = _Worker(process, mark)
            self._spawn(self._follow(rank, self._workers[rank]))

    async def _follow(self, rank: int, worker: _Worker) -> None:
        """Report the output of a worker, and its end."""
        streams = {"text": worker.process.stdout, "error": worker.process.stderr}
        tell = (self._tell(rank, worker, *each) for each in streams.items())
        printed = asyncio.gather(*tell)
        await worker.over.wait()
        await self._end_rest(worker)
        worker.gone.set()
        await printed
        await self._send_timeline(rank)
        code = worker.process.returncode
        self._say(rank=rank, ended=code, not_first=worker.mark.exists())

    async def _send_timeline(self, rank: int) -> None:
        for path in self._folder.glob(f"timeline-{rank}.*"):
            text = path.read_text()
            for at in range(0, len(text), protocol.PIECE):
                self._say(rank=rank, timeline=text[at : at + protocol.PIECE])
                with contextlib.suppress(ConnectionError):
                    await self._out.drain()

    async def _end_rest(self, worker: _Worker) -> None:
        """Let the rest of a worker's group (a shell script's program, say) end within the grace."""
        if worker.has_group() and time.monotonic() > worker.warned + self._grace:
            worker.signal(signal.SIGTERM)
        while worker.has_group() and time.monotonic() < worker.warned + self._grace:
            await asyncio.sleep(_LOOK)
        worker.signal(signal.SIGKILL)

    async def _tell(self, rank: int, worker: _Worker, what: str, stream: IO[bytes] | None) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        reader = await _reader(stream)
        while data := await _next(reader, worker):
            if text := decoder.decode(data):
                self._say(**{"rank": rank, what: text})
                with contextlib.suppress(ConnectionError):
                    await self._out.drain()  # a slow reader slows workers down, as a pipe does

    def _look(self) -> None:
        """Collect children that have ended: workers, or orphans that they have left."""
        own = {worker.process.pid: worker for worker in self._workers.values()}
        peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, peek):
                if worker := own.get(ended.si_pid):
                    worker.process.wait()
                    worker.over.set()
                else:
                    os.waitpid(ended.si_pid, 0)

    def _signal(self, number: int) -> None:
        for worker in self._workers.values():
            if worker.runs:
                worker.signal(number)

    async def _end(self) -> None:
        """Ask workers to end; after the grace period, kill them."""
        self._signal(signal.SIGTERM)
        end = time.monotonic() + self._grace
        while time.monotonic() < end and any(w.has_group() for w in self._workers.values()):
            await asyncio.sleep(_LOOK)
        for worker in self._workers.values():
            worker.signal(signal.SIGKILL)


async def _next(reader: asyncio.StreamReader, worker: _Worker) -> bytes:
    """Return a worker's next output; empty at the end, or if nothing comes once it is gone.

    A process that has left its group may hold its output open. Only waiting for that process is
    limited: the reader of printed output may be slow.
    """
    reading = asyncio.ensure_future(reader.read(protocol.PIECE))
    gone = asyncio.ensure_future(worker.gone.wait())
    await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if not reading.done():
        began = time.monotonic()
        await asyncio.wait({reading}, timeout=max(0.0, worker.left))
        worker.left -= time.monotonic() - began
    if not reading.done():
        reading.cancel()
        return b""
    return reading.result()


async def _reader(stream: Any) -> asyncio.StreamReader:
    found = asyncio.StreamReader(limit=protocol.LONGEST)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(found), stream)
    return found


def _prepare(cores: Sequence[int] | None, parent: int) -> None:
    """Prepare a worker's process, before its program runs."""
    processes.signal_when_parent_ends(signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    if cores:
        os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    main()
