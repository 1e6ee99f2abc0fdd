"""Slow links on one machine: a network namespace for each worker, and a switch between them.

    worker 0 (tfscale-PID-N-0)      worker 1 (tfscale-PID-N-1)
       eth0  10.77.x.1                 eth0  10.77.x.2
         |  tbf: rate out                |
    port0 ------- bridge (tfscale-PID-N-switch) ----- port1
            tbf: rate in

N counts the networks of a process. The bridge has a namespace of its own. So nothing appears in
the machine's network, its firewall does not see the packets, and deleting the namespaces deletes
everything.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_UNITS = {"bit": 1, "bps": 8}
_PREFIXES = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]i?)?(bit|bps)", re.IGNORECASE)
_NAME = re.compile(r"tfscale-(\d+)-\d+-(switch|\d+)")  # process, network, worker
_numbers = itertools.count()  # of the networks of this process


class LinkError(RuntimeError):
    """Error if links cannot be shaped here; the message says what is missing."""


def bytes_per_second(rate: str) -> float:
    """Return the bytes per second of a rate in ``tc``'s notation.

    Examples are "1gbit" and "200mbit"; "10mbps" means 10 megabytes per second.

    Example:
        >>> bytes_per_second("1gbit")
        125000000.0
    """
    match = _RATE.fullmatch(rate.strip())
    if not match or not float(match[1]):
        raise LinkError(f"{rate!r} is not a rate; write it as tc does: 1gbit, 200mbit")
    return float(match[1]) * _PREFIXES[(match[2] or "").lower()] * _UNITS[match[3].lower()] / 8


def burst(rate: str) -> int:
    """Return how many bytes a port may send at once, above its rate, after a pause.

    A large burst lets whole messages pass without a limit, so that small all-reduces look
    faster than the link. A small burst loses rate whenever the kernel wakes the port late: a
    burst of 64 KiB, as much as the kernel hands over at once, lost half of 1 Gbit/s. So a
    burst has the bytes of a millisecond, and at least 128 KiB.
    """
    return max(1 << 17, int(bytes_per_second(rate) * 0.001))


def check() -> None:
    """Raise ``LinkError`` if links cannot be shaped here."""
    if os.geteuid() != 0:
        raise LinkError(
            "shaping links (--link) needs root, since it makes network namespaces: run the same "
            "command with sudo"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LinkError(f"--link needs {' and '.join(missing)}: sudo apt-get install iproute2")


class Network:
    """Namespaces with shaped links, which exist until the ``with`` block ends.

    Args:
        count: number of workers.
        rate: rate of each worker's port in either direction, in ``tc``'s notation.

    Example:
        >>> with Network(2, "1gbit") as network:  # doctest: +SKIP
        ...     LocalWorkers(command, 2, hosts=network.hosts, prefixes=network.prefixes)
    """

    def __init__(self, count: int, rate: str) -> None:
        self.rate = rate
        me, number = os.getpid(), next(_numbers)
        self._switch = f"tfscale-{me}-{number}-switch"
        self._names = [f"tfscale-{me}-{number}-{i}" for i in range(count)]
        self.hosts = [f"10.77.{me % 256}.{i + 1}" for i in range(count)]
        self.prefixes: list[Sequence[str]] = [["ip", "netns", "exec", n] for n in self._names]
        self.interface = "eth0"
        self.environment = {
            "TFSCALE_SHARED_MEMORY": "0"
        }  # else messages would bypass the shaped links

    def __enter__(self) -> Network:
        check()
        remove_stale()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _build(self) -> None:
        switch = self._switch
        _run(f"ip netns add {switch}")
        _run(f"ip -n {switch} link add bridge type bridge")
        _run(f"ip -n {switch} link set bridge up")
        for index, (name, host) in enumerate(zip(self._names, self.hosts, strict=True)):
            port = f"port{index}"
            _run(f"ip netns add {name}")
            _run(f"ip -n {switch} link add {port} type veth peer name eth0 netns {name}")
            _run(f"ip -n {switch} link set {port} master bridge up")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} addr add {host}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            self._shape(name, "eth0")
            self._shape(switch, port)

    def change(self, rate: str) -> None:
        """Change the rate of all ports, also while programs use them."""
        self.rate = rate
        for index, name in enumerate(self._names):
            self._shape(name, "eth0", "change")
            self._shape(self._switch, f"port{index}", "change")

    def _shape(self, name: str, device: str, how: str = "add") -> None:
        limit = f"rate {self.rate} burst {burst(self.rate)} latency 50ms"
        try:
            _run(f"tc -n {name} qdisc {how} dev {device} root tbf {limit}")
        except LinkError as error:
            raise LinkError(
                f"{error}\nIf this kernel lacks the token bucket filter, load it: modprobe sch_tbf"
            ) from None

    def _remove(self) -> None:
        for name in (*self._names, self._switch):
            _delete(name)


def namespaces() -> list[str]:
    """Return the names of all network namespaces that this module has made and not deleted."""
    folder = Path("/run/netns")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(name for name in names if _NAME.fullmatch(name))


def remove_stale() -> None:
    """Remove the namespaces of runs that were killed before they could clean up."""
    for name in namespaces():
        match = _NAME.fullmatch(name)
        if match and not Path(f"/proc/{match[1]}").exists():
            _delete(name)


def _delete(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise LinkError(f"`{command}` failed: {done.stderr.strip() or done.returncode}")
