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

from tfscale.launch.greeting import LONGEST

NOTHING_LISTENS = "nothing listens there"
_TAKEN = 1.0  # seconds to find out whether somebody listens at a port of this machine


async def listen(
    called: Callable[..., Awaitable[None]],
    host: str,
    port: int,
    share_port: bool,
    longest: int = LONGEST,
) -> asyncio.AbstractServer:
    """At this address, or everywhere, as TensorFlow's own server.

    Everywhere, too, for a name: a machine may know its own name by another address than others do.

    Args:
        called: a coroutine function of each connection's reader and writer; the connection is
            closed when it returns.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # The loop's end cancels this task. Before 3.12, Python prints a traceback then if the
            # task counts as cancelled.
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
    """Whether it is an IP address, and not a host name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def listens_everywhere(server: Any) -> bool:
    """Whether a server listens at all of this machine's addresses."""
    return "0.0.0.0" in {each.getsockname()[0] for each in server.sockets}


async def refuse_listener(host: str, port: int) -> None:
    """A port that may be shared can still be taken."""
    try:
        _, writer = await within(_TAKEN, asyncio.open_connection(host, port))
    except (OSError, asyncio.TimeoutError):
        return
    writer.close()
    raise OSError(errno.EADDRINUSE, "in use")


async def within(seconds: float, doing: Any) -> Any:
    """Python's own ``wait_for`` forgets to be cancelled where both happen at once, before 3.12."""
    task = asyncio.ensure_future(doing)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
    if not done:
        raise asyncio.TimeoutError
    return task.result()


async def closed(writer: asyncio.StreamWriter) -> None:
    """Waits until a connection is closed, even if it was broken before."""
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def split(address: str) -> tuple[str, int]:
    """The host and the port of an address such as ``host:port`` or ``[::1]:port``."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def joined(host: str, port: int) -> str:
    """The inverse of ``split``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def words(error: OSError) -> str:
    """What a network's error means, in words."""
    if isinstance(error, socket.gaierror):
        return "its host name is not known here"
    if error.errno == errno.ECONNREFUSED or "refused" in str(error):  # of several, one text
        return NOTHING_LISTENS
    if error.errno == errno.EADDRINUSE:
        return "another program has it"
    return os.strerror(error.errno) if error.errno else str(error)
