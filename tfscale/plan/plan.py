"""Plans: the best cuts of a model on a cluster, why, and what can be run of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfscale.collectives import Link, wires
from tfscale.plan import pipelines
from tfscale.plan.cluster import Cluster, read_cluster
from tfscale.plan.cut import ORDERS, Cut, Price
from tfscale.plan.formulas.state import ADAM, SHARDS, Numbers
from tfscale.plan.measure import Measured
from tfscale.plan.price import Pricer
from tfscale.plan.read import can_be_staged, read
from tfscale.plan.runs import missing, strategy_arguments
from tfscale.plan.search import Found, MemoryLimitError, search
from tfscale.plan.units import Unit, checked_units, read_unit, unit_fields
from tfscale.support import arguments, records
from tfscale.support.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZES = ("rows", "columns", "stages", "microbatches", "every")
_TEXTS = ("order", "shard", "wire")
_FLAGS = ("recompute", "lean", "offload")
_BOUNDS = {
    "compute": "the devices' rate: {share:.0%} of the step is computation",
    "row": "messages between the ranks that share a sample: {share:.0%} of the step",
    "bubble": "the pipeline's bubble: its stages wait for {share:.0%} of the step",
    "sums": "the sums of gradients: {share:.0%} of the step",
    "update": "the optimizer, and what each step takes at least: {share:.0%} of the step",
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The fastest known cuts of a model on a cluster.

    Attributes:
        units: the model.
        batch: samples of a step.
        cluster: the machines.
        numbers: bytes of a parameter.
        found: prices of the best cuts, and the bound of the search.
        wires: formats in which gradients may be sent.
        runnable: whether cuts that ``ScaleStrategy`` cannot run were left out.
        staged: whether the model can be cut into stages: it is Sequential or functional.
        diloco: number of steps of rounds that were priced, too; None for none.

    Example:
        >>> cluster = "2 x (1 device), 10gbit"
        >>> plan = tfscale.plan.best(model, batch=64, cluster=cluster, runnable=True)
        >>> plan.strategy_arguments()
        {'algorithm': 'ring', 'wire': 'fp32'}
    """

    units: tuple[Unit, ...]
    batch: int
    cluster: Cluster
    numbers: Numbers
    found: Found
    wires: tuple[str, ...] = ("fp32",)
    runnable: bool = False
    staged: bool = True
    diloco: int | None = None

    @property
    def price(self) -> Price:
        """The price of the best cut."""
        return self.found.prices[0]

    @property
    def cut(self) -> Cut:
        """The best cut."""
        return self.price.cut

    def strategy_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``ScaleStrategy`` that run the plan, as far as it can be run."""
        return strategy_arguments(self.price, self.units, self.cluster)

    def cannot_run(self) -> list[str]:
        """Return what no argument of ``ScaleStrategy`` does yet; empty if the plan can be run."""
        return missing(self.price, self.units, self.staged)

    def table(self) -> str:
        """Return the best cuts as a table for a terminal."""
        head = (
            "cut",
            "step",
            "samples/s",
            "compute",
            "rows",
            "bubble",
            "sums",
            "update",
            "GB",
            "schedule",
        )
        rows: list[tuple[str, ...]] = [head]
        for price in self.found.prices:
            parts = [f"{price.parts[name] / price.seconds:.0%}" for name in _BOUNDS]
            rows.append(
                (
                    str(price.cut),
                    told_seconds(price.seconds),
                    f"{self.batch / price.seconds:.4g}",
                    *parts, f"{price.bytes / 1e9:.3g}", price.algorithm or "-",
                )
            )  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)

    def explain(self) -> str:
        """Return in words what bounds the plan, what to buy next, and what can be run of it."""
        price, parameters = self.price, sum(unit.parameters for unit in self.units)
        bound = max(price.parts, key=lambda name: price.parts[name])
        share = price.parts[bound] / price.seconds
        memory = ", ".join(
            f"{name} {size / 1e9:.3g}" for name, size in price.memory.items() if size
        )
        lines = [
            f"{len(self.units)} units with {parameters:,.0f} parameters, a batch of {self.batch}, "
            f"on {self.cluster}",
            f"Best: {price.cut}. A step takes {told_seconds(price.seconds)}.",
            f"It is bound by {_BOUNDS[bound].format(share=share)}.",
            f"Memory: {price.bytes / 1e9:.3g} of {self.cluster.memory / 1e9:.3g} GB on the fullest "
            f"device ({memory}).",
            f"Gap: no cut in the search is more than {self.found.gap:.1%} faster "
            f"({self.found.priced} priced).",
            *self._next_buys(),
        ]
        missing = self.cannot_run()
        told = ", ".join(f"{name}={value!r}" for name, value in self.strategy_arguments().items())
        lines.append(f"Run it with ScaleStrategy({told}).")
        if missing:
            lines.append(f"ScaleStrategy cannot run yet: {'; '.join(missing)}.")
        return "\n".join(lines)

    def _next_buys(self) -> list[str]:
        """Return what twice as much of each thing would bring, the best first."""
        found = sorted(self.next_buys().items(), key=lambda one: -one[1])
        told = [f"{name} {gain:.2f}x" for name, gain in found]
        return [f"Next best thing to buy, by samples per second: {', '.join(told)}."]

    def next_buys(self) -> dict[str, float]:
        """Return by how much twice as much of each thing would speed up a sample."""
        hosts, link = self.cluster.hosts, self.cluster.link

        def hosts_with(**changes: Any) -> Cluster:
            changed = [
                dataclasses.replace(host, **{k: v(getattr(host, k)) for k, v in changes.items()})
                for host in hosts
            ]
            return dataclasses.replace(self.cluster, hosts=changed)

        offers: dict[str, tuple[Cluster, int]] = {
            "devices of twice the rate": (hosts_with(rate=lambda rate: 2 * rate), 1),
            "twice the memory": (hosts_with(memory=lambda memory: 2 * memory), 1),
            "a batch of twice the size": (self.cluster, 2),
        }
        if len(hosts) > 1:
            faster = dataclasses.replace(self.cluster, link=_half(link))
            offers["a link between hosts of half the time"] = (faster, 1)
        if self.cluster.width > 1:
            offers["links within hosts of half the time"] = (hosts_with(link=_half), 1)
        gains = {}
        for name, (cluster, factor) in offers.items():
            try:
                batch = factor * self.batch
                seconds = self._again(cluster, batch).prices[0].seconds
                gains[name] = factor * self.price.seconds / seconds
            except MemoryLimitError:
                gains[name] = 0.0
        return gains

    def _again(self, cluster: Cluster, batch: int) -> Found:
        return search(
            self.units, batch, cluster, numbers=self.numbers, wires=self.wires, keep=1,
            runnable=self.runnable, staged=self.staged, diloco=self.diloco,
        )  # fmt: skip

    def order(self) -> pipelines.PipelineOrder:
        """Return the pipeline's order as data; with one stage, that of one rank."""
        cut = self.cut
        if cut.order == "interleaved":
            return pipelines.interleaved(cut.stages, cut.microbatches, cut.chunks)
        make = pipelines.zero_bubble if cut.order == "zero bubble" else pipelines.one_f_one_b
        return make(cut.stages, cut.microbatches)

    def draw(self) -> Figure:
        """Plot the best cuts: what their time goes to, and the memory that they take."""
        from tfscale.plan.draw import draw_prices

        return draw_prices(self.found.prices, self.cluster.memory)

    def save(self, path: str | Path) -> None:
        """Write a JSON file that ``load`` reads: the model's units, the cluster, and the cuts."""
        fields = {
            "batch": self.batch,
            "cluster": self.cluster.as_fields(),
            "numbers": dataclasses.asdict(self.numbers),
            "units": [unit_fields(unit) for unit in self.units],
            "cuts": [dataclasses.asdict(price.cut) for price in self.found.prices],
            "bound": self.found.bound,
            "priced": self.found.priced,
            "wires": list(self.wires),
            "runnable": self.runnable,
            "staged": self.staged,
            "diloco": self.diloco or 0,
        }
        records.write(Path(arguments.path(path, "path")), fields)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file that ``save`` has written, and price its cuts again."""
        file = Record.read(Path(arguments.path(path, "path")))
        file.only(
            "batch", "cluster", "numbers", "units", "cuts", "bound", "priced", "wires", "runnable",
            "staged", "diloco",
        )  # fmt: skip
        units = checked_units([read_unit(row) for row in file.records("units")])
        cluster = read_cluster(file.record("cluster"))
        numbers = file.record("numbers")
        numbers.only("weights", "gradients", "state")
        of = Numbers(*(numbers.number(name) for name in ("weights", "gradients", "state")))
        runnable, staged = file.flag("runnable"), file.flag("staged")
        pricer = Pricer(units, file.integer("batch"), cluster, of, runnable)
        prices = [_priced(pricer, row) for row in file.records("cuts")]
        if not prices:
            raise file.wrong("cuts", "one cut or more")
        found = Found(tuple(prices), file.number("bound"), file.integer("priced"))
        wires = arguments.items(file.texts("wires"), "wires", "a list of wires", _wire)
        diloco = file.integer("diloco") or None
        return cls(units, pricer.batch, cluster, of, found, wires, runnable, staged, diloco)


def best(
    model: Any,
    batch: int,
    cluster: Cluster | str,
    *,
    wires: Sequence[str] = ("fp32",),
    numbers: Numbers = ADAM,
    example: Any = None,
    keep: int = 5,
    runnable: bool = False,
    diloco: int | None = None,
) -> Plan:
    """Return a plan: the fastest known cuts of a model on a cluster.

    Args:
        model: a built Keras model; what ``measured`` returns of one; or a list of ``Unit``.
        batch: samples of a step, of all devices.
        cluster: a ``Cluster``, or its short text.
        wires: formats in which gradients may be sent. All but ``fp32`` change results.
        numbers: bytes of a parameter; by default those of float32 with Adam.
        example: a batch of the model's inputs, if the model does not know its shapes.
        keep: number of cuts to return.
        runnable: whether to leave out cuts that ``ScaleStrategy`` cannot run yet.
        diloco: a number of steps, to price rounds of so many steps between hosts, or between racks
            if the cluster has racks. DiLoCo changes results.

    Example:
        >>> plan = tfscale.plan.best(model, batch=64, cluster="4 x (2 devices, 16GB), 10gbit")
        >>> plan.cut.ranks
        8
    """
    checked = arguments.items(wires, "wires", "a list of wires, such as ['fp32']", _wire)
    arguments.whole(batch, "batch", 1, what="a number of samples")
    arguments.whole(keep, "keep", 1, 1000, what="a number of cuts")
    arguments.instance(numbers, "numbers", Numbers, "Numbers, such as Numbers(4, 4, 8)")
    machines = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    expected = "a Cluster, or a text such as '4 x (2 devices, 16GB), 10gbit'"
    arguments.instance(machines, "cluster", Cluster, expected)
    arguments.optional(arguments.data, example, "example")
    arguments.optional(arguments.whole, diloco, "diloco", 2, what="a number of steps, or None")
    arguments.flag(runnable, "runnable")
    if isinstance(model, Measured):
        units, staged = model.units, model.staged
    elif isinstance(model, (list, tuple)):
        units, staged = checked_units(model, "model"), True
    else:
        units, staged = checked_units(read(model, example), "model"), can_be_staged(model)
    found = search(
        units, batch, machines, numbers=numbers, wires=checked, keep=keep, runnable=runnable,
        staged=staged, diloco=diloco,
    )  # fmt: skip
    return Plan(units, batch, machines, numbers, found, checked, runnable, staged, diloco)


def _half(link: Link) -> Link:
    return Link(link.alpha / 2, link.beta / 2)


def _wire(value: Any, name: str) -> str:
    return wires.checked(value, name)


def told_seconds(seconds: float) -> str:
    """Return a time with its unit.

    Example:
        >>> told_seconds(0.01234)
        '12.3 ms'
    """
    for unit, size in (("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _priced(pricer: Pricer, row: Record) -> Price:
    row.only(*_SIZES, *_TEXTS, *_FLAGS)
    fields: dict[str, Any] = {name: row.integer(name) for name in _SIZES}
    if min(fields.values()) < 1:
        raise row.wrong(min(fields, key=lambda name: fields[name]), "a number of 1 or more")
    fields |= {name: row.text(name) for name in _TEXTS}
    fields |= {name: row.flag(name) for name in _FLAGS}
    arguments.choice(fields["order"], "order", ORDERS)
    arguments.choice(fields["shard"], "shard", SHARDS)
    _wire(fields["wire"], "wire")
    price = pricer.price(Cut(**fields))
    if price is None:
        raise row.wrong("rows", "1: rows share nothing of this model")
    return price
