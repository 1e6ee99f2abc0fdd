"""The machines on which a model is to be trained: hosts with devices, racks, and their links."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfscale.collectives import Cluster as Groups, Link
from tfscale.collectives.cost import Machine, slowest
from tfscale.support import arguments, records
from tfscale.support.records import Record
from tfscale.support.sizes import number_of_bytes

RATE = 10e12  # operations per second of a device, if a text names none
MEMORY = 16e9
LAUNCH = 1e-5  # of a kernel or two on a GPU
INSIDE = Link(alpha=5e-6, beta=1 / 10e9)  # if a text names none
BETWEEN = Link(alpha=5e-5, beta=8e-9)

_EXPECTED = "a text such as '64 x (4 devices, 16GB, 90TFLOPS, 100GB/s), 25gbit'"
_GROUP = re.compile(r"(?:(\d+)\s*x\s*)?\(([^()]*)\)")
_RACKS = re.compile(r",\s*racks of\s+(\d+)((?:,[^,]*)*)$")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


@dataclasses.dataclass(frozen=True)
class Host:
    """One machine.

    Args:
        devices: number of its devices.
        memory: bytes of each device.
        rate: floating-point operations per second that a device reaches in training.
        link: the link between its devices.
        bus: bytes per second between a device and the host's memory; 0 if nothing is kept there.
        launch: seconds that the forward or backward pass of a layer takes at least.
        update: seconds in which an optimizer updates one parameter.
        pack: seconds in which a device packs a number for a message, and unpacks it.
    """

    devices: int = 1
    memory: float = MEMORY
    rate: float = RATE
    link: Link = INSIDE
    bus: float = 0.0
    launch: float = LAUNCH
    update: float = 0.0
    pack: float = 0.0

    def __post_init__(self) -> None:
        arguments.real(self.bus, "bus", 0, what="a number of bytes per second")
        for name in ("launch", "update", "pack"):
            arguments.real(getattr(self, name), name, 0, what="a number of seconds")
        arguments.whole(self.devices, "devices", 1, what="a number of devices")
        arguments.real(self.memory, "memory", above=0, what="a number of bytes")
        arguments.real(self.rate, "rate", above=0, what="a number of operations per second")
        expected = "a Link, such as Link(alpha=5e-6, beta=1e-10)"
        arguments.instance(self.link, "link", Link, expected)


@dataclasses.dataclass(frozen=True)
class Racks:
    """Racks of equally many hosts, which are further apart than the hosts of one rack.

    Args:
        hosts: number of hosts in a rack.
        link: the link of a rack to the others, which its hosts share.
    """

    hosts: int
    link: Link = BETWEEN

    def __post_init__(self) -> None:
        arguments.whole(self.hosts, "racks", 1, what="a number of hosts in a rack")
        expected = "a Link, such as Link(alpha=5e-5, beta=8e-9)"
        arguments.instance(self.link, "link", Link, expected)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts, and the link between any two of them, which the devices of a host share.

    Args:
        hosts: the hosts; devices are numbered host by host.
        link: the link of each host to the others.
        racks: the racks in which the hosts stand; None if all hosts are equally far apart.
        gamma: seconds in which a device adds a byte that has arrived; links were measured with it.
        step: seconds that a step takes beside its passes, sums and updates.

    Example:
        >>> cluster = Cluster.parse("64 x (4 devices, 16GB, 100GB/s), 25gbit")
        >>> cluster.devices, cluster.memory
        (256, 16000000000)
        >>> print(cluster)
        64 x (4 devices, 16 GB, 10 TFLOPS, 100 GB/s), 25 gbit
    """

    hosts: Sequence[Host]
    link: Link = BETWEEN
    racks: Racks | None = None
    gamma: float = 0.0
    step: float = 0.0

    def __post_init__(self) -> None:
        expected = "a list of Hosts, such as [Host(devices=4)] * 8"
        one = lambda value, name: arguments.instance(value, name, Host, expected)  # noqa: E731
        object.__setattr__(self, "hosts", arguments.items(self.hosts, "hosts", expected, one))
        expected = "a Link, such as Link(alpha=5e-5, beta=8e-9)"
        arguments.instance(self.link, "link", Link, expected)
        if self.racks is not None:
            expected = "Racks, such as Racks(hosts=16), or None"
            arguments.instance(self.racks, "racks", Racks, expected)
        arguments.real(self.gamma, "gamma", 0, what="a number of seconds per byte")
        arguments.real(self.step, "step", 0, what="a number of seconds")

    @property
    def devices(self) -> int:
        """Number of devices of all hosts."""
        return sum(host.devices for host in self.hosts)

    @functools.cached_property
    def worst(self) -> Host:
        """A host that is as bad as the worst host in each way."""
        links = [host.link for host in self.hosts]
        return Host(
            devices=min(host.devices for host in self.hosts),
            memory=min(host.memory for host in self.hosts),
            rate=min(host.rate for host in self.hosts),
            link=Link(max(link.alpha for link in links), max(link.beta for link in links)),
            bus=min(host.bus for host in self.hosts),
            launch=max(host.launch for host in self.hosts),
            update=max(host.update for host in self.hosts),
            pack=max(host.pack for host in self.hosts),
        )

    @property
    def memory(self) -> float:
        """Bytes of the device with the least memory."""
        return self.worst.memory

    @functools.cached_property
    def rates(self) -> list[float]:
        """The rate of each device."""
        return [host.rate for host in self.hosts for _ in range(host.devices)]

    @property
    def width(self) -> int:
        """Number of devices on the smallest host."""
        return self.worst.devices

    @property
    def inner(self) -> Link:
        """The slowest link within a host."""
        return self.worst.link

    def first(self, devices: int) -> Cluster:
        """Return a cluster of so many devices: the first hosts, or more copies of the last one."""
        hosts: list[Host] = []
        left, given = devices, list(self.hosts)
        while left:
            host = given.pop(0) if given else self.hosts[-1]
            hosts.append(dataclasses.replace(host, devices=min(host.devices, left)))
            left -= hosts[-1].devices
        return dataclasses.replace(self, hosts=hosts)

    def machines(self, ranks: int, stride: int) -> list[Machine]:
        """Return how the links between some devices look to a schedule that has groups.

        A hierarchical schedule knows two levels. So if the devices stand in several racks, there
        are two views: groups are what is within a host, or what is within a rack. What is farther
        apart counts as the slowest link.

        All devices of a host are taken to use its link to other hosts at the same time, each for
        its own team; and all hosts of a rack likewise.

        Args:
            ranks: number of devices.
            stride: how many devices each of them stands after the last.
        """
        span, host, rack = (ranks - 1) * stride, self.width, self._rack_width
        if span < host:
            return [self.inner]
        between_hosts = _shared(self.link, min(host, self.devices))
        if span < rack or self.racks is None:
            return [_in_groups(ranks, host // stride, self.inner, between_hosts)]
        between_racks = _shared(self.racks.link, min(rack, self.devices))
        far, near = (
            Link(max(a.alpha, b.alpha), max(a.beta, b.beta))
            for a, b in ((between_hosts, between_racks), (self.inner, between_hosts))
        )
        return [
            _in_groups(ranks, host // stride, self.inner, far),
            _in_groups(ranks, rack // stride, near, far),
        ]

    def slowest(self, ranks: int, stride: int) -> Link:
        """Return the slowest link between some devices: see ``machines``."""
        return slowest(self.machines(ranks, stride)[0])

    @property
    def _rack_width(self) -> int:
        """Number of devices in a rack; of all devices if there are no racks."""
        return self.devices if self.racks is None else self.racks.hosts * self.width

    def __str__(self) -> str:
        groups: list[tuple[Host, int]] = []
        for host in self.hosts:
            if groups and groups[-1][0] == host:
                groups[-1] = host, groups[-1][1] + 1
            else:
                groups.append((host, 1))
        told = " + ".join(f"{count} x ({_told(host)})" for host, count in groups)
        found = f"{told}, {_told_link(self.link)}"
        if self.racks is None:
            return found
        return f"{found}, racks of {self.racks.hosts}, {_told_link(self.racks.link)}"

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read a text: ``"2 x (4 devices, 16GB, 90TFLOPS) + (8 devices, 40GB), 25gbit, 50us"``.

        A host has a number of devices, a memory, a rate and a link, in any order, and may have a
        bus to its own memory, ``12GB/s bus``, and a time of launches, ``20us launch``. What is left
        out has a default. After the hosts stand the bandwidth and the latency between hosts, and
        then the racks, if there are any, with the link between racks: ``racks of 16, 100gbit``.
        """
        text = arguments.text(text, "cluster", _EXPECTED)
        groups, rest = list(_GROUP.finditer(text)), _GROUP.sub("@", text)
        racks = _RACKS.search(rest)
        rest = rest if racks is None else rest[: racks.start()]
        outer = re.fullmatch(r"\s*@(?:\s*\+\s*@)*\s*((?:,[^,+@]*)*)", rest)
        if not groups or outer is None:
            raise arguments.wrong(text, "cluster", _EXPECTED)
        hosts: list[Host] = []
        for group in groups:
            count = arguments.whole(int(group[1] or 1), "cluster", 1, 100_000, what="hosts")
            hosts += [_host(group[2], text)] * count
        link = _outer_link(outer[1], text)
        if racks is None:
            return cls(hosts, link)
        return cls(hosts, link, Racks(int(racks[1]), _outer_link(racks[2], text)))

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a JSON file, such as ``dump`` writes."""
        return read_cluster(Record.read(Path(arguments.path(path, "path"))))

    def dump(self, path: str | Path) -> None:
        """Write a JSON file that ``load`` reads."""
        records.write(Path(path), self.as_fields())

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of a file."""
        hosts = [{"count": 1, **dataclasses.asdict(host)} for host in self.hosts]
        joined: list[dict[str, Any]] = []
        for host in hosts:
            if joined and {**joined[-1], "count": 1} == host:
                joined[-1]["count"] += 1
            else:
                joined.append(host)
        found = {
            "hosts": joined, "link": dataclasses.asdict(self.link), "gamma": self.gamma,
            "step": self.step,
        }  # fmt: skip
        return found if self.racks is None else {**found, "racks": dataclasses.asdict(self.racks)}


def _shared(link: Link, devices: int) -> Link:
    """Return a link as each of so many devices sees it that use it at the same time."""
    return Link(link.alpha, link.beta * devices)


def _in_groups(ranks: int, together: int, inner: Link, outer: Link) -> Machine:
    """Return the machine of ranks in groups of ``together``; one link if that does not divide."""
    if together <= 1 or ranks % together:
        return outer
    return Groups([together] * (ranks // together), inner, outer)


def read_cluster(file: Record) -> Cluster:
    """Return the cluster that a file describes."""
    file.only("hosts", "link", "racks", "gamma", "step")
    hosts: list[Host] = []
    for row in file.records("hosts"):
        row.only("count", "devices", "memory", "rate", "link", "bus", "launch", "update", "pack")
        link = _link(row.record("link")) if "link" in row else INSIDE
        host = Host(
            row.integer("devices"),
            row.number("memory") if "memory" in row else MEMORY,
            row.number("rate") if "rate" in row else RATE,
            link,
            row.number("bus") if "bus" in row else 0.0,
            row.number("launch") if "launch" in row else LAUNCH,
            row.number("update") if "update" in row else 0.0,
            row.number("pack") if "pack" in row else 0.0,
        )
        count = row.integer("count") if "count" in row else 1
        if not 1 <= count <= 100_000:
            raise row.wrong("count", "a number of hosts from 1 to 100,000")
        hosts += [host] * count
    if not hosts:
        raise file.wrong("hosts", "one host or more")
    more = {name: file.number(name) for name in ("gamma", "step") if name in file}
    return Cluster(hosts, _link(file.record("link")), _racks(file), **more)


def _racks(file: Record) -> Racks | None:
    if "racks" not in file:
        return None
    row = file.record("racks")
    row.only("hosts", "link")
    return Racks(row.integer("hosts"), _link(row.record("link")))


def _link(fields: Record) -> Link:
    fields.only("alpha", "beta")
    return Link(fields.number("alpha"), fields.number("beta"))


def _host(words: str, text: str) -> Host:
    found = _quantities(words, text)
    link = Link(found.pop("alpha", INSIDE.alpha), found.pop("beta", INSIDE.beta))
    return Host(**found, link=link)


def _outer_link(words: str, text: str) -> Link:
    """Read what stands after hosts, or after racks: ``", 25gbit, 50us"``."""
    found = _quantities(words.strip(" ,"), text)
    if not found.keys() <= {"beta", "alpha"}:
        raise arguments.wrong(text, "cluster", _EXPECTED, "Memory stands inside the brackets")
    return Link(found.get("alpha", BETWEEN.alpha), found.get("beta", BETWEEN.beta))


def _quantities(words: str, text: str) -> dict[str, Any]:
    """Read ``"4 devices, 16GB, 100GB/s"``; raise if a part is not understood or stands twice."""
    found: dict[str, Any] = {}
    for part in words.split(",") if words.strip() else []:
        name, value = _quantity(part.strip())
        if name is None or name in found:
            said = f"{part.strip()!r} is not understood" if name is None else f"two of {name}"
            raise arguments.wrong(text, "cluster", _EXPECTED, said)
        found[name] = value
    return found


def _quantity(part: str) -> tuple[str | None, Any]:
    if found := re.fullmatch(r"(\d+)\s*devices?", part):
        return "devices", int(found[1])
    number = r"(\d+\.?\d*|\.\d+)\s*"
    if found := re.fullmatch(number + r"([KMGT]?)B/s\s+bus", part, re.I):
        return "bus", float(found[1]) * _UNITS[found[2].upper()]
    if (found := re.fullmatch(number + r"([KMGTP]?)FLOPS?(?:/s)?", part, re.I)) and float(found[1]):
        return "rate", float(found[1]) * _UNITS[found[2].upper()]
    if (found := re.fullmatch(number + r"([KMGT]?)bits?(?:/s)?", part, re.I)) and float(found[1]):
        return "beta", 8 / (float(found[1]) * _UNITS[found[2].upper()])
    if (found := re.fullmatch(number + r"([KMGT]?)B/s", part, re.I)) and float(found[1]):
        return "beta", 1 / (float(found[1]) * _UNITS[found[2].upper()])
    if found := re.fullmatch(number + r"(us|ms|s)\s+launch", part):
        return "launch", float(found[1]) * _SECONDS[found[2]]
    if found := re.fullmatch(number + r"(us|ms|s)", part):
        return "alpha", float(found[1]) * _SECONDS[found[2]]
    if re.fullmatch(number + r"[KMGT]i?B", part, re.I):
        return "memory", number_of_bytes(part, "memory")
    return None, None


def _told_link(link: Link) -> str:
    return f"{8e-9 / link.beta if link.beta else float('inf'):.4g} gbit"


def _told(host: Host) -> str:
    bandwidth = f"{1e-9 / host.link.beta:.4g} GB/s" if host.link.beta else "free link"
    devices = f"{host.devices} device{'s' * (host.devices > 1)}"
    found = f"{devices}, {host.memory / 1e9:.4g} GB, {host.rate / 1e12:.4g} TFLOPS, {bandwidth}"
    found += f", {host.bus / 1e9:.4g} GB/s bus" if host.bus else ""
    return found if host.launch == LAUNCH else f"{found}, {1e6 * host.launch:.4g} us launch"
