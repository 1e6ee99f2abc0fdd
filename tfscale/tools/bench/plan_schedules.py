"""``tfscale bench plan --parts schedules``: forecasts of sums by schedule and wire.

The forecast of a step is the time of a step without an exchange, which is measured in turns with
the training, plus the price of the schedule on the measured links, plus the time in which gradients
are packed: what an exchange of all gradients takes alone on that wire, beyond its price.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tfscale.collectives import wires
from tfscale.collectives.choose import Chooser, read_machine
from tfscale.collectives.registry import resolve
from tfscale.support.records import Record
from tfscale.tools.bench.fit_contestants import FitContestant
from tfscale.tools.bench.fit_crew import Crew
from tfscale.tools.bench.link import Network


def measured(
    arguments: Any,
    model: str,
    processes: int,
    network: Network | None,
    folder: Path,
    show: Callable[[str, float], None],
) -> Iterator[tuple[str, float, float]]:
    """Yield the name, the measured and the forecast seconds of a step by each schedule and wire."""

    def crew_of(way: str, wire: str, algorithm: str) -> Crew:
        given = FitContestant("plan", way, way, model, processes, wire=wire, algorithm=algorithm)
        return Crew(given, network, folder, arguments.timeout)

    with crew_of("apart", "fp32", "auto") as apart:
        for wire in arguments.wires:
            show(f"the links with {wire}", 0.0)
            with crew_of("sums", wire, "auto") as crew:
                links = Record(crew.ask(links=1)[0], Path("links"))
                pack = packing(crew.turn(arguments.steps), links, processes, wire, crew.parameters)
            for number, algorithm in enumerate(arguments.algorithms):
                name = f"{algorithm} {wire}"
                show(name, number / len(arguments.algorithms))
                with crew_of("scale", wire, algorithm) as crew:
                    pairs = [
                        (apart.turn(arguments.steps), crew.turn(arguments.steps))
                        for _ in range(arguments.rounds)
                    ]
                    price = sums(links, algorithm, processes, wire, crew.parameters)
                alone, together = (statistics.median(times) for times in zip(*pairs))
                yield name, together, alone + price + pack


def packing(exchange: float, links: Record, ranks: int, wire: str, parameters: int) -> float:
    """Return the seconds in which a step's gradients are packed and unpacked.

    Args:
        exchange: seconds of an exchange of all gradients on the wire, without a training.
        links: the measured links, as ``Chooser`` has them.
        ranks: number of ranks.
        wire: name of the wire.
        parameters: number of parameters.
    """
    chooser = Chooser(read_machine(links, ranks), links.number("gamma"), ranks)
    return max(0.0, exchange - chooser.predicted(wires.nbytes(wire, parameters)))


def sums(links: Record, algorithm: str, ranks: int, wire: str, parameters: int) -> float:
    """Return the price of the sums of a step's gradients.

    Args:
        links: the measured links, as ``Chooser`` has them.
        algorithm: name of a schedule.
        ranks: number of ranks.
        wire: name of a wire.
        parameters: number of parameters.
    """
    cost = resolve(algorithm, ranks).cost
    assert cost is not None
    measured = read_machine(links, ranks)
    return float(cost.time(wires.nbytes(wire, parameters), measured, links.number("gamma")))
