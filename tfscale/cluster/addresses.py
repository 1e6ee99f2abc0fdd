"""Addresses of workers, ``host:port``, and errors of the network in words."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import Any

NOTHING_LISTENS = "nothing listens there"


def split(address: str) -> tuple[str, int]:
    """Return the host and the port of an address such as ``host:port`` or ``[::1]:port``."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    """Join a host and a port: the inverse of ``split``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_address(value: object) -> bool:
    """Return whether a value is a text like ``host:port``."""
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return bool(host and colon) and port.isdecimal() and 0 < int(port) < 65536


def is_ip_address(host: str) -> bool:
    """Return whether the host is an IP address (or localhost), not a host name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def resolved(host: str) -> list[Any]:
    """Return the addresses of a host as ``getaddrinfo`` does; empty if this machine knows none."""
    try:
        return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return []


def held_ports(count: int, host: str = "127.0.0.1") -> list[socket.socket]:
    """Return sockets that hold free ports of an address, or of all addresses if it is empty.

    A held port stays free for its worker. A worker of the same user may share the port with the
    socket that holds it; TensorFlow's server does if TF_GRPC_REUSE_PORT is set.
    """
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        each.bind((host, 0))
    return held


def describe_error(error: OSError) -> str:
    """Describe a network error."""
    if isinstance(error, socket.gaierror):
        return "its host name is not known here"
    # with several errors, the text is the only sign
    if error.errno == errno.ECONNREFUSED or "refused" in str(error):
        return NOTHING_LISTENS
    if error.errno == errno.EADDRINUSE:
        return "another program has it"
    return os.strerror(error.errno) if error.errno else str(error)
