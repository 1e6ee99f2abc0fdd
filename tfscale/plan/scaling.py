"""Scaling curves of data parallelism, and what binds at each number of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfscale.collectives import Link
from tfscale.plan.cluster import Cluster
from tfscale.plan.cut import Cut
from tfscale.plan.price import Pricer
from tfscale.plan.units import Unit, checked_units
from tfscale.support import arguments

KINDS = ("strong", "weak")


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of a scaling curve.

    Args:
        ranks: number of devices.
        batch: samples of a step.
        seconds: time of a step.
        speed_up: how many times as many samples per second pass as on one device.
        limit: what takes the most time: ``"compute"``; ``"latency"`` or ``"bandwidth"`` of the
            sums of gradients; ``"batch"`` if there are more devices than samples.
    """

    ranks: int
    batch: int
    seconds: float
    speed_up: float
    limit: str

    @property
    def efficiency(self) -> float:
        """Speed-up by the number of devices."""
        return self.speed_up / self.ranks


def curve(
    units: Sequence[Unit], batch: int, cluster: Cluster, ranks: Sequence[int], kind: str = "strong"
) -> list[Point]:
    """Return the scaling curve of data parallelism.

    Args:
        units: the model.
        batch: samples of a step: of all devices together in strong scaling, of each device in weak
            scaling.
        cluster: the machines; more devices than it has are copies of its last host.
        ranks: numbers of devices.
        kind: ``"strong"`` or ``"weak"``.

    Example:
        >>> from tfscale.plan import Cluster, Unit
        >>> model = [Unit("dense", "dense", parameters=1e6, flops=2e6)]
        >>> cluster = Cluster.parse("(1 device, 1TFLOPS), 10gbit")
        >>> for point in curve(model, 1024, cluster, [1, 8, 64, 4096]):
        ...     print(point.ranks, round(point.speed_up, 1), point.limit)
        1 1.0 compute
        8 0.9 bandwidth
        64 0.9 bandwidth
        4096 0.8 batch
    """
    units = checked_units(units)
    arguments.whole(batch, "batch", 1, what="a number of samples")
    expected = "a Cluster, such as Cluster.parse('(4 devices), 25gbit')"
    arguments.instance(cluster, "cluster", Cluster, expected)
    arguments.choice(kind, "kind", KINDS)
    one = lambda value, name: arguments.whole(value, name, 1, 100_000)  # noqa: E731
    ranks = arguments.items(ranks, "ranks", "a list of numbers of devices", one)
    alone = _seconds(units, batch, cluster, 1)
    points = []
    for count in ranks:
        samples = batch * (count if kind == "weak" else 1)
        used = min(count, samples)
        seconds = _seconds(units, samples, cluster, used)
        speed_up = alone / seconds * samples / batch
        limit = "batch" if count > samples else _limit(units, samples, cluster, used)
        points.append(Point(count, samples, seconds, speed_up, limit))
    return points


def powers(first: int, last: int) -> list[int]:
    """Return the powers of two from ``first`` to ``last``, and both ends.

    Example:
        >>> powers(1, 12)
        [1, 2, 4, 8, 12]
    """
    found = {first, last, *(1 << n for n in range(last.bit_length()) if first <= 1 << n <= last)}
    return sorted(found)


def _seconds(units: Sequence[Unit], batch: int, cluster: Cluster, ranks: int) -> float:
    price = Pricer(units, batch, cluster.first(ranks)).price(Cut(columns=ranks))
    assert price is not None
    return price.seconds


def _limit(units: Sequence[Unit], batch: int, cluster: Cluster, ranks: int) -> str:
    """Return what takes the most time: the sums without latency are their bandwidth's part."""
    price = Pricer(units, batch, cluster.first(ranks)).price(Cut(columns=ranks))
    hosts = [dataclasses.replace(h, link=_without_latency(h.link)) for h in cluster.hosts]
    racks = cluster.racks
    if racks is not None:
        racks = dataclasses.replace(racks, link=_without_latency(racks.link))
    free = dataclasses.replace(
        cluster, hosts=hosts, link=_without_latency(cluster.link), racks=racks
    )
    fast = Pricer(units, batch, free.first(ranks)).price(Cut(columns=ranks))
    assert price is not None and fast is not None
    parts = {
        "compute": price.parts["compute"],
        "bandwidth": fast.parts["sums"],
        "latency": price.parts["sums"] - fast.parts["sums"],
    }
    return max(parts, key=lambda name: parts[name])


def _without_latency(link: Link) -> Link:
    return Link(0, link.beta)
