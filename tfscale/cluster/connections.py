"""Connections between processes that meet: lines of JSON, which may come from any program.

Whoever reads a message gets it only if it is a JSON object of limited length; ``fields`` returns
its fields only if they have the expected types.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
from collections.abc import Awaitable, Callable
from typing import Any

from tfscale.cluster import addresses

PROTOCOL = 1  # changes whenever two versions cannot talk to each other
LONGEST = 4 << 20  # bytes of a message: the addresses of 100,000 workers
CONNECT, ANSWER = 5.0, 5.0  # seconds for a connection, and for the first message on it
_TAKEN = 1.0  # seconds to find out whether a program listens at a port of this machine

# Reasons why a call has ended.
CUT_OFF = "it was there, but has ended or was cut off"
NO_ANSWER = f"no answer within {CONNECT:.0f} s"
_SENDS_NOTHING = "it accepts connections, but sends nothing"
_NO_WORKER = (
    "something answers there that is not a starting worker: "
    "another program uses this port, or a training that already runs"
)
_OTHER_VERSION = "another version of tfscale runs there; install the same everywhere"

Message = dict[str, Any]


class NoWorker(Exception):
    """Raised if the sender is not a worker that is starting."""

    def __init__(self, problem: str = _NO_WORKER) -> None:
        super().__init__(problem)


class Connection:
    """A connection to another process, which may be any program."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def own_host(self) -> str:
        """Address of this machine, as the other side knows it."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def other_host(self) -> str:
        """Address of the other side's machine."""
        return str(self._writer.get_extra_info("peername")[0])

    def send(self, message: Message) -> None:
        """Send a message, unless the connection is closing."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self, seconds: float | None = None) -> Message | None:
        """Return the next message, or None at the end of the connection.

        Raises:
            NoWorker: if the message is too long, or is no JSON object.
            asyncio.TimeoutError: if nothing comes within these seconds.
        """
        try:
            line = await within(seconds, self._reader.readline())
            message = json.loads(line) if line else None
        except (ValueError, RecursionError):  # readline refuses long lines by a ValueError
            raise NoWorker from None
        if line and not isinstance(message, dict):
            raise NoWorker
        return message

    async def receive_greeting(self, seconds: float) -> Message:
        """Return the first message; raise if there is none."""
        message = await self.receive(seconds)
        if message is None:
            raise NoWorker
        return message

    def close(self) -> None:
        """Close the connection; what was sent still travels."""
        self._writer.close()

    async def closed(self) -> None:
        """Wait until the connection is closed, even if it was broken before."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def check_version(greeting: Message) -> None:
    """Raise if a greeting comes from another version of tfscale, or from another program."""
    version = greeting.get("tfscale")
    if version is None:
        raise NoWorker
    if version != PROTOCOL:
        raise NoWorker(_OTHER_VERSION)


def fields(message: Message, **types: type) -> list[Any]:
    """Return some fields of a message; raise if one is missing or of another type."""
    values = [message.get(name) for name in types]
    if any(type(value) is not kind for value, kind in zip(values, types.values())):
        raise NoWorker
    return values


def printable(text: str) -> str:
    """Replace characters that would disturb a terminal, since peers' texts are printed."""
    return "".join(c if c.isprintable() else "?" for c in text)


async def call(host: str, port: int, converse: Callable[[Connection], Awaitable[None]]) -> str:
    """Connect to a process and talk to it until the connection ends; return why it has ended."""
    connection = None
    try:
        opening = asyncio.open_connection(host, port, limit=LONGEST)
        connection = Connection(*await within(CONNECT, opening))
        await converse(connection)
        return CUT_OFF
    except asyncio.TimeoutError:
        return _SENDS_NOTHING if connection else NO_ANSWER
    except NoWorker as problem:
        return str(problem)
    except OSError as error:
        return addresses.describe_error(error)
    finally:
        if connection:
            connection.close()


async def listen(
    answer: Callable[[Connection], Awaitable[None]],
    host: str,
    port: int,
    longest: int = LONGEST,
    share_port: bool = False,
) -> asyncio.AbstractServer:
    """Listen at this address, or at all addresses, as TensorFlow's own server does.

    For a name the server listens at all addresses, too: a machine may resolve its own name to
    another address than others do.

    Args:
        answer: talks on a connection, which is closed when it returns.
        host: this machine's name or address.
        port: the port.
        longest: most bytes of a message.
        share_port: whether a socket that does not listen may hold the port.
    """

    async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The end of the event loop cancels this task. Before 3.12, Python prints a traceback if
        # the task then counts as cancelled.
        ends = asyncio.CancelledError, NoWorker, OSError, asyncio.TimeoutError
        try:
            with contextlib.suppress(*ends):
                await answer(Connection(reader, writer))
        finally:
            writer.close()

    if share_port:
        await _refuse_listener(host, port)
    places = [host, None, "0.0.0.0"] if addresses.is_ip_address(host) else [None, "0.0.0.0"]
    for place in places:
        try:
            return await asyncio.start_server(
                called, place, port, limit=longest, backlog=4096, reuse_port=share_port or None
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE or place is places[-1]:
                raise
    raise AssertionError("there is a last place")


def listens_everywhere(server: Any) -> bool:
    """Return whether a server listens at all of this machine's addresses."""
    return "0.0.0.0" in {each.getsockname()[0] for each in server.sockets}


async def _refuse_listener(host: str, port: int) -> None:
    """Raise if a program listens at a port: a port that may be shared can still be taken."""
    try:
        _, writer = await within(_TAKEN, asyncio.open_connection(host, port))
    except (OSError, asyncio.TimeoutError):
        return
    writer.close()
    raise OSError(errno.EADDRINUSE, "in use")


async def within(seconds: float | None, doing: Any) -> Any:
    """Wait with a time limit.

    Before 3.12, Python's ``wait_for`` loses a cancellation that comes at the same moment as the
    result.
    """
    task = asyncio.ensure_future(doing)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
    if not done:
        raise asyncio.TimeoutError
    return task.result()
