"""What messages travel over: our own sockets and shared memory, or TensorFlow's gRPC."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from tfscale import arguments

TRANSPORTS = ("auto", "sockets", "grpc")

# How a message goes, as ``Communicator.ways`` says; or "shared memory", "TCP to ...", "gRPC".
# C++ says it: custom_ops/engine/transport.h.
WITHIN_PROCESS = "the same process"

# Environment variables, read when a group is made.
TRANSPORT = "TFSCALE_TRANSPORT"  # decides where the program leaves it at "auto"
INTERFACE = "TFSCALE_INTERFACE"  # where sockets listen: an address, or a network interface's name
PORTS = "TFSCALE_PORTS"  # at which ports: 20000-20100
STREAMS = "TFSCALE_STREAMS"  # how many TCP connections each pair of ranks has
SHARED_MEMORY = "TFSCALE_SHARED_MEMORY"  # 0: processes of one host use TCP, too

MOST_STREAMS = 64


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
        "streams": _streams(environment.get(STREAMS, "1")),
        "shared_memory": _switch(environment.get(SHARED_MEMORY, "1")),
    }


def checked(transport: str, what: str = "transport") -> str:
    """The same; an error if there is none of this name."""
    return arguments.choice(transport, what, TRANSPORTS)


def reachable_host(own: str, others: Sequence[str]) -> str:
    """The address of this machine at which other workers reach it.

    That is its own in the cluster, unless the machine does not have it (it may be a service's), or
    knows itself by it as the loopback, as Debian's /etc/hosts has it: others do not. Then it is the
    address from which this machine reaches the others.

    Args:
        own: a name or number.
        others: of the other workers.
    """
    if is_here(own) and not is_loopback(own):
        return own
    far = next((other for other in others if not is_loopback(other)), None)
    if far is None:
        return own
    return _address_towards(far) or own


def _resolved(host: str) -> list[Any]:
    try:
        return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return []


def is_loopback(host: str) -> bool:
    """Whether this machine knows a host by loopback addresses alone."""
    found = [entry[4][0].partition("%")[0] for entry in _resolved(host)]
    return bool(found) and all(ipaddress.ip_address(each).is_loopback for each in found)


def is_here(host: str) -> bool:
    """Whether one can listen at a host's address on this machine."""
    for family, kind, _, _, address in _resolved(host):
        with socket.socket(family, kind) as tried, contextlib.suppress(OSError):
            tried.bind(address)
            return True
    return False


def _address_towards(host: str) -> str | None:
    """Nothing is sent: the kernel only says which address it would send from."""
    for family, _, _, _, address in _resolved(host):
        with socket.socket(family, socket.SOCK_DGRAM) as tried, contextlib.suppress(OSError):
            tried.connect((address[0], 9, *address[2:]))
            return str(tried.getsockname()[0])
    return None


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


def _streams(given: str) -> int:
    number = int(given) if re.fullmatch(r"\d{1,3}", given) else 0
    if not 1 <= number <= MOST_STREAMS:
        raise ValueError(f"{STREAMS} is a whole number from 1 to {MOST_STREAMS}, got {given!r}")
    return number


def _switch(given: str) -> bool:
    if given not in ("0", "1"):
        raise ValueError(f"{SHARED_MEMORY} is 1 or 0, got {given!r}")
    return given == "1"
