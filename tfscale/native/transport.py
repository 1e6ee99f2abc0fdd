"""Transport of messages: our own sockets and shared memory, or TensorFlow's gRPC."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from tfscale.cluster.addresses import resolved
from tfscale.support import arguments

TRANSPORTS = ("auto", "sockets", "grpc")

# One of the descriptions in ``Communicator.ways``, which come from custom_ops/engine/transport.h.
# The others are "shared memory", "TCP to ..." and "gRPC".
WITHIN_PROCESS = "the same process"

# Environment variables, read when a group is made.
TRANSPORT = "TFSCALE_TRANSPORT"  # the transport if the program chooses "auto"
INTERFACE = "TFSCALE_INTERFACE"  # address, or network interface's name, at which sockets listen
PORTS = "TFSCALE_PORTS"  # range of ports at which sockets listen: 20000-20100
STREAMS = "TFSCALE_STREAMS"  # number of TCP connections between two ranks
SHARED_MEMORY = "TFSCALE_SHARED_MEMORY"  # 0: processes of one host use TCP instead

MOST_STREAMS = 64


def attributes(
    transport: str, host: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the attributes of the communicator's op that describe its transport.

    Args:
        transport: one of ``TRANSPORTS``.
        host: this process's address in the cluster; empty for a single process.
        environment: environment variables; by default those of this process.
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
    """Return ``transport`` if it is one of ``TRANSPORTS``, else raise an error that lists them."""
    return arguments.choice(transport, what, TRANSPORTS)


def reachable_host(own: str, others: Sequence[str]) -> str:
    """Return the address of this machine at which other workers reach it.

    This is the machine's address in the cluster, with two exceptions: the machine does not have
    that address (a service may have it), or the address means the loopback on this machine, as by
    Debian's /etc/hosts, but not on others. Then it is the address from which this machine reaches
    the others.

    Args:
        own: this machine's address in the cluster, a name or a number.
        others: addresses of the other workers.
    """
    if is_here(own) and not is_loopback(own):
        return own
    far = next((other for other in others if not is_loopback(other)), None)
    if far is None:
        return own
    return _address_towards(far) or own


def is_loopback(host: str) -> bool:
    """Return whether this machine resolves a host only to loopback addresses."""
    found = [entry[4][0].partition("%")[0] for entry in resolved(host)]
    return bool(found) and all(ipaddress.ip_address(each).is_loopback for each in found)


def is_here(host: str) -> bool:
    """Return whether a socket can listen at a host's address on this machine."""
    for family, kind, _, _, address in resolved(host):
        with socket.socket(family, kind) as tried, contextlib.suppress(OSError):
            tried.bind(address)
            return True
    return False


def _address_towards(host: str) -> str | None:
    """Return the address from which this machine would send to a host; None if it has none.

    This sends nothing: connecting a datagram socket only makes the kernel choose an address.
    """
    for family, _, _, _, address in resolved(host):
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
