"""Messages of workers that meet: lines of JSON, which may come from any program."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

PROTOCOL = 1  # changes whenever two versions cannot talk to each other
LONGEST = 4 << 20  # bytes of a message: the addresses of 100,000 workers

SILENT = (
    "something answers there that is not a starting worker: "
    "another program uses this port, or a training that already runs"
)
OTHER_VERSION = "another version of tfscale runs there; install the same everywhere"


class Worker(NamedTuple):
    """A worker: its name and address, equal for all workers."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"


class Hello(NamedTuple):
    """The message in which a process introduces itself."""

    place: int  # index in the list of workers
    process: str  # for people to read
    start: str  # random, different for each process
    workers: list[Worker]


class NoWorker(Exception):
    """Raised if the sender is not a worker that is starting."""


async def line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line of the other side; raise if it is longer than a message may be."""
    try:
        return await reader.readline()
    except ValueError:  # longer than a message may be
        raise NoWorker(SILENT) from None


def write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send a message, unless the connection is closing."""
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


def parsed(data: bytes) -> dict[str, Any]:
    """Parse a message, which may come from any program."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise NoWorker(SILENT)
    return found


def read_hello(data: bytes) -> Hello:
    """Parse an introduction; raise if it is invalid or from another version."""
    found = parsed(data)
    protocol = found.get("tfscale")
    if protocol is not None and protocol != PROTOCOL:
        raise NoWorker(OTHER_VERSION)
    place, process, start = (found.get(name) for name in ("place", "process", "start"))
    workers = _read_workers(found.get("workers"))
    if protocol is None or not isinstance(process, str) or not isinstance(start, str):
        raise NoWorker(SILENT)
    if type(place) is not int or not 0 <= place < len(workers):
        raise NoWorker(SILENT)
    return Hello(place, printable(process), start, workers)


def _read_workers(found: Any) -> list[Worker]:
    if not isinstance(found, list):
        raise NoWorker(SILENT)
    for one in found:
        if not isinstance(one, list) or [type(x) for x in one] != [str, str]:
            raise NoWorker(SILENT)
    return [Worker(printable(name), printable(address)) for name, address in found]


def printable(text: str) -> str:
    """Replace characters that would disturb a terminal, since peers' texts are printed."""
    return "".join(c if c.isprintable() else "?" for c in text)
