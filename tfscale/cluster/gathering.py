"""A wait for other workers: its deadline, its messages to the user, its connections and its end.

Two protocols use it: ``meeting.py``, whose workers know all addresses, and ``collect.py``, whose
workers know only where worker 0 is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from tfscale.cluster.connections import Connection, Message, printable

FIRST_LOG, BETWEEN_LOGS = 10.0, 30.0  # seconds of waiting until a log, and until the next one
_GRACE = 1.0  # seconds in which a restarted worker may take its own place
_LAST_WORDS = 5.0  # seconds in which connections may still send at the end
_NAMED = 8  # largest number of workers in a message

T = TypeVar("T")


class JoinError(RuntimeError):
    """Raised if workers have not all met; the message says who is missing, or what is wrong."""


@dataclass(eq=False)
class Arrival:
    """A connection to a process that has introduced itself."""

    connection: Connection
    process: str  # process and host, for people to read
    identity: object  # differs between processes


A = TypeVar("A", bound=Arrival)


class Gathering(Generic[T]):
    """A wait for all workers, with one outcome: what was wanted, or a ``JoinError``.

    Args:
        timeout: number of seconds to wait for the others.
        say: called now and then with a line about missing workers.
    """

    advice: ClassVar[str]  # what to check if workers are missing
    start_once: str  # what to do if two processes were started as one worker

    def __init__(self, timeout: float, say: Callable[[str], None]) -> None:
        self._timeout = timeout
        self._say = say
        self._server: asyncio.AbstractServer | None = None
        self._connections: set[Connection] = set()  # those on which both sides are known
        self._end: asyncio.Future[T]

    async def run(self) -> T:
        """Wait until the outcome is known; tell all connected workers if it is an error."""
        self._end = asyncio.get_running_loop().create_future()
        tasks = [asyncio.create_task(one) for one in (self._log_waiting(), *self._activities())]
        for task in tasks:
            task.add_done_callback(self._fail_with)
        try:
            return await self._end
        except Exception as error:
            await self._give_up({"gave up": str(error) or repr(error)})
            raise
        finally:
            for task in tasks:
                task.cancel()
            await self._close()

    def _activities(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return what goes on until the outcome is known."""
        raise NotImplementedError

    def _name(self) -> str:
        """Return this worker's name, and what is wrong with it."""
        raise NotImplementedError

    def _missing(self) -> str:
        """Return for whom or what this worker waits."""
        raise NotImplementedError

    # -- the outcome

    def _succeed(self, result: T) -> None:
        if not self._end.done():
            self._end.set_result(result)

    def _fail(self, message: str) -> None:
        if not self._end.done():
            self._end.set_exception(JoinError(message))

    def _fail_with(self, task: asyncio.Task[None]) -> None:
        """End the wait with the error of an activity, rather than after ``join_timeout``."""
        if task.cancelled() or self._end.done():
            return
        error = task.exception()
        if error is not None:
            self._end.set_exception(error)

    async def _give_up(self, message: Message) -> None:
        self._send_to_all(message)

    def _fail_if_other_has(self, message: Message, other: str) -> None:
        """Fail if a message says that its sender has failed."""
        reason = message.get("gave up")
        if isinstance(reason, str):
            self._fail(f"{other} has given up: {printable(reason)}")

    async def _log_waiting(self) -> None:
        """Log now and then which workers are missing, and fail with that at the end."""
        clock = asyncio.get_running_loop().time
        began = clock()
        for seconds in log_times(self._timeout):
            await asyncio.sleep(began + seconds - clock())
            self._say(self._waiting(seconds))
        await asyncio.sleep(began + self._timeout - clock())
        waiting = self._waiting(self._timeout)
        self._fail(f"{waiting}. {self.advice} (join_timeout={self._timeout:g}).")

    def _waiting(self, seconds: float) -> str:
        return f"{self._name()} has waited {seconds:.0f} s for {self._missing()}"

    # -- connections

    def _send_to_all(self, message: Message) -> None:
        for connection in self._connections:
            connection.send(message)

    @contextlib.contextmanager
    def _present(self, arrivals: list[A], arrival: A, name: str) -> Iterator[None]:
        """Count a process as present while its connection lasts; fail if there are two of a name.

        Args:
            arrivals: connections to processes of this name.
            arrival: the new connection.
            name: what the process was started as.
        """
        arrivals.append(arrival)
        self._connections.add(arrival.connection)
        asyncio.get_running_loop().call_later(_GRACE, self._refuse_duplicates, arrivals, name)
        try:
            yield
        finally:
            arrivals.remove(arrival)
            self._connections.discard(arrival.connection)

    def _refuse_duplicates(self, arrivals: Sequence[Arrival], name: str) -> None:
        processes = {each.identity: each.process for each in arrivals}
        if len(processes) > 1:
            one, other, *_ = processes.values()
            self._refuse(self._duplicates(name, one, other))

    def _duplicates(self, name: str, one: str, other: str) -> str:
        return f"two processes were started as {name}: {one}, and {other}. {self.start_once}"

    def _refuse(self, message: str) -> None:
        """Fail because of a process that should not be there."""
        self._fail(message)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        closing = [asyncio.create_task(one.closed()) for one in self._connections]
        for connection in self._connections:
            connection.close()
        if closing:
            await asyncio.wait(closing, timeout=_LAST_WORDS)


def log_times(timeout: float = math.inf) -> Iterator[float]:
    """Yield the numbers of seconds after which a waiting worker logs."""
    return itertools.takewhile(
        lambda seconds: seconds < timeout, itertools.count(FIRST_LOG, BETWEEN_LOGS)
    )


def this_process() -> str:
    """Return this process and its host, for people to read."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def list_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *more])
