"""``tfscale bench plan --parts layouts``: forecasts of layouts, from measured layers and links.

Nothing that a forecast uses comes from a training in that layout. On each process, at the same
time, layers and the optimizer are timed one by one, and so is a step of ``fit`` that sums nothing;
a strategy measures the links. The planner prices each layout on these, and then ``fit`` trains in
it. Each process keeps to a core of its own: a stage that waits would lend its core to the others,
which no two machines do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tfscale.collectives import Cluster as Groups
from tfscale.collectives.choose import read_machine
from tfscale.plan import Cluster, Cut, Host, Price, Unit
from tfscale.plan.price import Pricer
from tfscale.plan.runs import missing, strategy_arguments
from tfscale.plan.units import read_unit
from tfscale.support.records import Record
from tfscale.tools.bench import holding, link
from tfscale.tools.bench.fit_contestants import FitContestant
from tfscale.tools.bench.fit_crew import Crew
from tfscale.tools.bench.plan_schedules import packing

MICROBATCHES = (2, 4)
_PERIOD = 0.01  # seconds: short, so that a single layer is as slow as a step


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout that is priced and measured.

    Args:
        cut: the cut.
        price: its price.
        arguments: arguments of ``ScaleStrategy``.
    """

    cut: Cut
    price: Price
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """Name in the table: the cut."""
        return str(self.cut)

    @property
    def way(self) -> str:
        """Way of the training, as ``FitContestant`` has it."""
        return "planned, recomputed" if self.cut.recompute else "planned"


def measured(
    arguments: Any,
    model: str,
    processes: int,
    network: link.Network | None,
    folder: Path,
    show: Callable[[str, float], None],
) -> Iterator[tuple[str, float, float]]:
    """Yield the name, the measured and the forecast seconds of a step in each layout."""
    with contextlib.ExitStack() as stack:
        held: list[str] = []
        if arguments.slow > 1:
            cores = [1 / arguments.slow] + [1.0] * (processes - 1)
            held = stack.enter_context(holding.holds(holding.QUOTA, cores, _PERIOD))

        def crew_of(way: str, **more: Any) -> Crew:
            one = FitContestant(
                "plan", way, way, model, processes, pinned=True, held=tuple(held), **more
            )
            return Crew(one, network, folder, arguments.timeout)

        with crew_of("apart") as apart:
            show("the layers and the links", 0.0)
            batch = apart.ask(batch=1)[0]
            with crew_of("scale") as crew:
                links = Record(crew.ask(links=1)[0], Path("links"))
            with crew_of("sums") as crew:
                exchange = crew.turn(arguments.steps)
            units, cluster = _known(apart, batch, processes, links, exchange, arguments)
        layouts = list(_layouts(units, batch * processes, cluster))
        for number, layout in enumerate(layouts):
            show(layout.name, number / len(layouts))
            with crew_of(layout.way, arguments=json.dumps(layout.arguments)) as crew:
                times = [crew.turn(arguments.steps) for _ in range(arguments.rounds)]
            yield layout.name, statistics.median(times), layout.price.seconds


def _known(
    apart: Crew, batch: int, processes: int, links: Record, exchange: float, arguments: Any
) -> tuple[list[Unit], Cluster]:
    """Return the model's units, and the cluster of these processes, both as measured.

    Args:
        apart: processes that train and exchange nothing.
        batch: samples of a batch of each.
        processes: number of processes.
        links: the links, as a strategy has measured them.
        exchange: seconds of an exchange of all gradients, without a training.
        arguments: the options of the command.
    """
    answers, times = apart.ask(units=batch), apart.ask(steps=arguments.steps)
    # Processes answer in any order; the slow one is the first.
    both = sorted(zip(answers, times, strict=True), key=lambda one: float(one[0]["rate"]))
    answers, times = (list(each) for each in zip(*both, strict=True))
    units = [read_unit(Record(fields, Path("units"))) for fields in answers[-1]["units"]]
    pack = packing(exchange, links, processes, "fp32", apart.parameters) / apart.parameters
    machine, gamma = read_machine(links, processes), links.number("gamma")
    assert not isinstance(machine, Groups)  # each process has one device
    if arguments.slow > 1:
        hosts = [_host([answer], pack) for answer in answers]
    else:  # what differs by chance is no reason for unequal shares
        hosts, times = [_host(answers, pack)] * processes, [max(times)]
    equal = Cluster([hosts[-1]] * processes, machine, gamma=gamma)
    price = Pricer(units, batch * processes, equal).price(Cut(columns=processes))
    assert price is not None
    rest = max(0.0, times[-1] - price.seconds + price.parts["sums"])
    return units, dataclasses.replace(equal, hosts=hosts, step=rest)


def _host(answers: Sequence[dict[str, Any]], pack: float) -> Host:
    """Return a host with one device, as fast as the mean of processes."""
    rate, launch, update = (
        statistics.mean(float(answer[name]) for answer in answers)
        for name in ("rate", "launch", "update")
    )
    return Host(1, 1e12, rate, launch=launch, update=update, pack=pack)


def _layouts(units: list[Unit], batch: int, cluster: Cluster) -> Iterator[Layout]:
    """Yield all layouts that the model can be trained in."""
    ranks = cluster.devices
    cuts = [Cut(columns=ranks, shard=shard) for shard in ("none", "gradients", "all")]
    cuts += [Cut(rows=ranks), Cut(columns=ranks, recompute=True)]
    cuts += [Cut(stages=ranks, microbatches=number) for number in MICROBATCHES]
    if ranks > 2:
        cuts += [Cut(columns=ranks // 2, rows=2), Cut(columns=ranks // 2, stages=2, microbatches=4)]
    pricer = Pricer(units, batch, cluster, runnable=True)
    for cut in cuts:
        price = pricer.price(cut) if cut.stages <= len(units) else None
        if price is not None and not missing(_by_arguments(price), units, staged=True):
            yield Layout(cut, price, strategy_arguments(price, units, cluster))


def _by_arguments(price: Price) -> Price:
    """Return a price without the recomputation, for which this benchmark uses a callback."""
    return dataclasses.replace(price, cut=dataclasses.replace(price.cut, recompute=False))
