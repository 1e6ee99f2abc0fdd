"""Messages between a launcher and its supervisors: lines of JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any

PROTOCOL = 1  # changes whenever two versions cannot talk to each other
LONGEST = 4 << 20  # bytes of a line: environments and command lines are long
PIECE = 1 << 16  # bytes of output in a line


def line(message: dict[str, Any]) -> bytes:
    """Return a message as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


def parsed(data: bytes) -> dict[str, Any] | None:
    """Parse a line; return None if it is not a message, such as a greeting of a login shell."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


async def read(reader: asyncio.StreamReader) -> bytes:
    """Return the next line; empty at the end, and if the line is longer than any message."""
    try:
        return await reader.readline()
    except (ValueError, OSError):
        return b""
