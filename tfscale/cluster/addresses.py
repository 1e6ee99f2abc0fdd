"""Addresses, ports and connections of workers that meet."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from tfscale.cluster.greeting import LONGEST

NOTHING_LISTENS = "nothing listens there"
_TAKEN = 1.0  # seconds to find out whether a program listens at a port of this machine


async def listen(
    called: Callable[..., Awaitable[None]],
    host: str,
    port: int,
    share_port: bool,
    longest: int = LONGEST,
) -> asyncio.AbstractServer:
    """Listen at this address, or at all addresses, as TensorFlow's own server does.

    For a name the server listens at all addresses, too: a machine may resolve its own name to
    another address than others do.

    Args:
        called: a coroutine function of each connection's reader and writer; the connection is
            closed when it returns.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # The end of the event loop cancels this task. Before 3.12, Python prints a traceback if
            # the task then counts as cancelled.
            with contextlib.suppress(asyncio.CancelledError):
                await called(reader, writer)
        finally:
            writer.close()

    places = [host, None, "0.0.0.0"] if is_number(host) else [None, "0.0.0.0"]
    for place in places:
        try:
            return await asyncio.start_server(
                answer, place, port, limit=longest, backlog=4096, reuse_port=share_port or None
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE or place is places[-1]:
                raise
    raise AssertionError("there is a last place")


def is_number(host: str) -> bool:
    """Return whether the host is an IP address (or localhost), not a host name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def listens_everywhere(server: Any) -> bool:
    """Return whether a server listens at all of this machine's addresses."""
    return "0.0.0.0" in {each.getsockname()[0] for each in server.sockets}


async def refuse_listener(host: str, port: int) -> None:
    """Raise if a program listens at a port: a port that may be shared can still be taken."""
    try:
        _, writer = await within(_TAKEN, asyncio.open_connection(host, port))
    except (OSError, asyncio.TimeoutError):
        return
    writer.close()
    raise OSError(errno.EADDRINUSE, "in use")


async def within(seconds: float, doing: Any) -> Any:
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


async def closed(writer: asyncio.StreamWriter) -> None:
    """Wait until a connection is closed, even if it was broken before."""
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def split(address: str) -> tuple[str, int]:
    """Return the host and the port of an address such as ``host:port`` or ``[::1]:port``."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def joined(host: str, port: int) -> str:
    """Join a host and a port: the inverse of ``split``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def words(error: OSError) -> str:
    """Describe a network error."""
    if isinstance(error, socket.gaierror):
        return "its host name is not known here"
    # with several errors, the text is the only sign
    if error.errno == errno.ECONNREFUSED or "refused" in str(error):
        return NOTHING_LISTENS
    if error.errno == errno.EADDRINUSE:
        return "another program has it"
    return os.strerror(error.errno) if error.errno else str(error)
