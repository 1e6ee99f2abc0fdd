"""Checks of the cluster that a training would find here, and of its workers' addresses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tfscale.cluster import addresses
from tfscale.native import transport
from tfscale.tools.doctor import network
from tfscale.tools.doctor.check import Check, ok, problem, warning

if TYPE_CHECKING:
    from tfscale.cluster.sources import Source

_SECONDS, _AT_ONCE = 5.0, 32
_SHOWN = 4  # largest number of shown addresses


def find(environ: Mapping[str, str]) -> tuple[Source | None, Check]:
    """Return the source that defines the cluster, as a training would find it, and a check."""
    from tfscale.cluster import sources

    try:
        source = sources.find_source(environ)
    except ValueError as error:
        return None, problem("cluster", str(error), "Correct it, or unset it to train alone.")
    if source is None:
        return None, ok("cluster", "none: trains alone")
    return source, ok(
        "cluster",
        f"{source.name}: this is worker {source.index} of {source.count}{_listed(source)}",
    )


def order(environ: Mapping[str, str]) -> Check:
    """Return a check that lists the sources of the cluster, in order of precedence."""
    from tfscale.cluster import sources

    if environ.get(sources.ONLY_TF_CONFIG):
        return ok("sources", f"TF_CONFIG alone, as {sources.ONLY_TF_CONFIG} is set")
    return ok("sources", f"the first source that is set, of {', '.join(sources.ORDER)}")


def _listed(source: Source) -> str:
    if source.addresses is None:
        return "; workers learn at the start where the others are"
    places = source.addresses
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return f": {', '.join(places[:_SHOWN])}{more}"


def workers(source: Source) -> list[Check]:
    """Return a check for each worker that cannot be reached, and one for all others."""
    if source.addresses is None:
        return [_meeting_place(source)]
    places = source.addresses
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        checks = threads.map(lambda place: _worker(places, place, source.index), range(len(places)))
        wrong = [check for check in checks if check is not None]
    well = len(places) - len(wrong)
    if well == 0:
        return wrong
    return [ok("workers", f"{well} of {len(places)} resolve and can be reached"), *wrong]


def _meeting_place(source: Source) -> Check:
    assert source.master is not None  # a source without both is refused
    name, address = "worker 0", "{}:{}".format(*source.master)
    wrong = _unknown(name, address) or (_answers(name, address) if source.index else None)
    return wrong or ok(name, f"{address}, which tells where all are, can be reached")


def _worker(places: list[str], index: int, own: int) -> Check | None:
    """Return a check of what is wrong with a worker; None if nothing is."""
    name, address = f"worker {index}", places[index]
    if wrong := _unknown(name, address):
        return wrong
    if _is_unreachable_loopback(places, address, index == own):
        return problem(
            name,
            f"{address} is this machine's own loopback, and other workers are on other hosts",
            "List the address at which the other hosts reach that worker.",
        )
    return _taken(name, address) if index == own else _answers(name, address)


def _unknown(name: str, address: str) -> Check | None:
    host = addresses.split(address)[0]
    if addresses.resolved(host):
        return None
    return problem(
        name,
        f"{address}: this machine does not know the host name {host}",
        "Correct the name in the cluster, or add it to DNS or /etc/hosts.",
    )


def _is_unreachable_loopback(places: list[str], address: str, own: bool) -> bool:
    """Return whether a worker's address is a loopback that other hosts cannot reach.

    A worker's own name may resolve to the loopback, as on Debian; other hosts resolve it otherwise.
    """
    host = addresses.split(address)[0]
    if not transport.is_loopback(host) or (own and not addresses.is_ip_address(host)):
        return False
    return any(network.is_far(addresses.split(each)[0]) for each in places)


def _answers(name: str, address: str) -> Check | None:
    host, port = addresses.split(address)
    try:
        socket.create_connection((host, port), _SECONDS).close()
    except ConnectionRefusedError:
        return None  # before the training, nothing listens there
    except TimeoutError:
        found = f"{address}: no answer in {_SECONDS:.0f} s"
    except OSError as error:
        found = f"{address}: {addresses.describe_error(error)}"
    else:
        return None  # the worker waits already
    return problem(
        name,
        found,
        f"See that the machine runs and that no firewall keeps port {port} from this one.",
    )


def _taken(name: str, address: str) -> Check | None:
    host, port = addresses.split(address)
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), _SECONDS).close()
        return warning(
            name,
            f"{address}, this worker's own port, is taken: a training runs there already, or "
            "another program",
            "Wait until it has ended, or give the cluster other ports.",
        )
    return None
