"""Checks of the transport, and of this worker's address."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfscale.cluster import addresses
from tfscale.native import transport
from tfscale.native.transport import INTERFACE, PORTS
from tfscale.tools.doctor.check import Check, ok, problem, warning

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_LINK_SCOPE = "20"
_FALLS_BACK = "gradients would go over TensorFlow's gRPC, which is slower"


def ways(environ: Mapping[str, str]) -> Check:
    """Check the transport that the environment's variables choose."""
    try:
        told = transport.attributes("auto", "", environ)
    except ValueError as error:
        name = str(error).partition(" ")[0]
        return problem("transport", str(error), f"Correct {name}, or unset it.")
    if told["transport"] == "grpc":
        return ok("transport", f"TensorFlow's gRPC ({transport.TRANSPORT}=grpc)")
    shared = "shared memory" if told["shared_memory"] else "TCP"
    streams = told["streams"]
    last = "" if told["transport"] == "sockets" else "; gRPC if workers cannot connect"
    ports = f"{told['first_port']}-{told['last_port']}" if told["first_port"] else "any"
    return ok(
        "transport",
        f"sockets: {shared} within a host, {streams} TCP stream{'s' * (streams > 1)} between "
        f"hosts, ports: {ports}{last}",
    )


def interface(environ: Mapping[str, str], cluster: Sequence[str], index: int) -> Check:
    """Check where this worker would listen; ``cluster`` has the addresses of all workers."""
    hosts = [addresses.split(address)[0] for address in cluster]
    there = interfaces()
    if asked := environ.get(INTERFACE):
        host, said = there.get(asked, asked), f"{INTERFACE}={asked}"
    elif hosts:
        others = [host for place, host in enumerate(hosts) if place != index]
        host, said = transport.reachable_host(hosts[index], others), "the cluster's addresses"
    else:
        listed = ", ".join(f"{name} {address}" for name, address in there.items())
        return ok("interface", f"the cluster's addresses will decide; there are {listed}")
    if wrong := _wrong_with(host, environ):
        return _cannot_listen(environ, f"{said}: {wrong}")
    name = next((name for name, address in there.items() if address == host), "")
    found = f"listens at {host}{name and f' ({name})'}, by {said}"
    if transport.is_loopback(host) and any(map(is_far, hosts)):
        return _cannot_listen(environ, f"{found}: other hosts cannot reach that")
    return ok("interface", found)


def _wrong_with(host: str, environ: Mapping[str, str]) -> str:
    if not transport.is_here(host):
        names = ", ".join(interfaces())
        return (
            f"{host} is neither a network interface of this machine ({names}) nor one of its "
            "addresses"
        )
    told = transport.attributes("auto", host, environ)
    first, last = told["first_port"], told["last_port"]
    if first and not any(_is_free(host, port) for port in range(first, last + 1)):
        return f"all ports of {PORTS}={environ[PORTS]} are taken at {host}"
    return ""


def _is_free(host: str, port: int) -> bool:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as tried:
        try:
            tried.bind(address)
        except OSError:
            return False
        return True


def _cannot_listen(environ: Mapping[str, str], found: str) -> Check:
    advice = (
        f"Set {INTERFACE} to the network interface, or the address, at which the other workers "
        f"reach this machine, and {PORTS} to ports that are free; or unset them."
    )
    if environ.get(transport.TRANSPORT) == "sockets":
        return problem("interface", found, advice)
    return warning("interface", f"{found}; {_FALLS_BACK}", advice)


def is_far(host: str) -> bool:
    """Return whether a host resolves to an address other than the loopback."""
    return bool(addresses.resolved(host)) and not transport.is_loopback(host)


def interfaces() -> dict[str, str]:
    """Return the address of each network interface: of version 4, if it has one."""
    found = _interfaces_of_version_6()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # the interface has no address of version 4
                answer = fcntl.ioctl(any_socket, _GET_ADDRESS, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _interfaces_of_version_6() -> dict[str, str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}
    each = [line.split() for line in lines]
    # Leave out addresses that are valid on one link only.
    return {
        name: socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
        for number, _, _, scope, _, name in each
        if scope != _LINK_SCOPE
    }


def host_name() -> Check:
    """Check that this machine's name resolves to an address that others can use, too."""
    name = socket.gethostname()
    try:
        known_as = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return warning(
            "host name",
            f"{name}, which this machine itself cannot resolve",
            "A cluster that lists this machine by its name cannot start: add the name to "
            "/etc/hosts, or list addresses.",
        )
    if not transport.is_loopback(name):
        return ok("host name", f"{name} is {known_as}")
    return ok(
        "host name",
        f"{name} is {known_as}, the loopback, as on Debian. A worker of that name listens at "
        f"the address from which it reaches the others; if that is the wrong one, set {INTERFACE}",
    )
