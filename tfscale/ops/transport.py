"""What messages travel over: our own sockets and shared memory, or TensorFlow's gRPC."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

TRANSPORTS = ("auto", "sockets", "grpc")

# How a message goes, as ``Communicator.ways`` says; or "shared memory", "TCP to ...", "gRPC".
WITHIN_PROCESS = "the same process"

# Environment variables, read when a group is made.
TRANSPORT = "TFSCALE_TRANSPORT"  # decides where the program leaves it at "auto"
INTERFACE = "TFSCALE_INTERFACE"  # where sockets listen: an address, or a network interface's name
PORTS = "TFSCALE_PORTS"  # at which ports: 20000-20100
SHARED_MEMORY = "TFSCALE_SHARED_MEMORY"  # 0: processes of one host use TCP, too


def attributes(
    transport: str, host: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What the communicator's op is told about its transport.

    Args:
        transport: one of ``TRANSPORTS``.
        host: this process's address in the cluster; empty if it is alone.
        environment: variables; those of this process by default.
    """
    environment = os.environ if environment is None else environment
    if checked(transport) == "auto":
        transport = checked(environment.get(TRANSPORT, "auto"), TRANSPORT)
    first, last = _ports(environment.get(PORTS, ""))
    return {
        "transport": transport,
        "host": host and environment.get(INTERFACE, host),
        "first_port": first,
        "last_port": last,
        "shared_memory": _switch(environment.get(SHARED_MEMORY, "1")),
    }


def checked(transport: str, what: str = "transport") -> str:
    """The same; an error if there is none of this name."""
    if transport not in TRANSPORTS:
        raise ValueError(f"{what} is one of {', '.join(map(repr, TRANSPORTS))}, got {transport!r}")
    return transport


def _ports(given: str) -> tuple[int, int]:
    if not given:
        return 0, 0
    found = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", given)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < first <= last < 2**16:
        raise ValueError(
            f"{PORTS} is a range of ports such as 20000-20100, each from 1 to 65535; got {given!r}"
        )
    return first, last


def _switch(given: str) -> bool:
    if given not in ("0", "1"):
        raise ValueError(f"{SHARED_MEMORY} is 1 or 0, got {given!r}")
    return given == "1"
