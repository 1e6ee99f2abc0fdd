"""``tfscale bench plan``: forecasts of steps against measured steps, by schedule and wire.

For each link and number of processes, the benchmark measures a step without an exchange, the links
as a strategy measures them, and steps of ``fit`` with each schedule and wire. The forecast of a
step is the time without an exchange, plus the price of the schedule on the measured links.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfscale.collectives import ALGORITHMS, wires
from tfscale.collectives.choose import read_machine
from tfscale.collectives.registry import resolve
from tfscale.support.records import Record
from tfscale.tools.bench import command, link, machine
from tfscale.tools.bench.fit_contestants import FitContestant
from tfscale.tools.bench.fit_crew import Crew
from tfscale.tools.launch import WorkerFailed

_LOOPBACK = "memory"  # processes of one machine, over shared memory


@dataclasses.dataclass(frozen=True)
class Row:
    """A forecast and its measurement.

    Args:
        link: rate of the links, or ``"memory"``.
        processes: number of processes.
        algorithm: the schedule.
        wire: the wire.
        measured: median seconds of a step.
        forecast: seconds that the price says.
    """

    link: str
    processes: int
    algorithm: str
    wire: str
    measured: float
    forecast: float

    @property
    def error(self) -> float:
        """Share by which the forecast differs from the measurement."""
        return abs(self.forecast / self.measured - 1)


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench plan``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    console = command.make_console()
    try:
        for rate in set(arguments.links) - {_LOOPBACK}:
            link.bytes_per_second(rate)
            link.check()
        command.check_folders(arguments.json)
        about = machine.describe()
        with command.ended_by_signals(), command.progress(console) as show:
            rows = [
                row
                for rate in arguments.links
                for processes in arguments.processes
                for row in _measure(arguments, rate, processes, show)
            ]
    except (link.LinkError, WorkerFailed, ImportError, OSError) as error:
        print(f"tfscale bench: error: {error}", file=sys.stderr)
        return 1
    for line in report(rows):
        console.print(line, soft_wrap=True)
    console.print(machine.signature(about, "plan", argv))
    if arguments.json:
        words = shlex.join(["tfscale", "bench", "plan", *argv])
        found = [{**dataclasses.asdict(row), "error": row.error} for row in rows]
        whole = {"command": words, "machine": about, "rows": found}
        arguments.json.write_text(json.dumps(whole, indent=1))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench plan``."""
    parser = argparse.ArgumentParser(
        prog="tfscale bench plan",
        description="Compare forecasts of steps with measured steps.",
        epilog="See docs/plan.md for what is priced, and how.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--links", type=command.list_of(str), default=_LOOPBACK, metavar="RATE,...",
        help="rates of links, such as 1gbit (root only), or memory "
        "(default: %(default)s)")  # fmt: skip
    add("--processes", type=command.list_of(command.whole_number), default="2", metavar="P,...",
        help="numbers of processes (default: %(default)s)")  # fmt: skip
    add("--algorithms", type=command.list_of(command.one_of(ALGORITHMS)), default="ring,direct",
        metavar="NAME,...", help="schedules (default: %(default)s)")  # fmt: skip
    add("--wires", type=command.list_of(command.one_of(wires.WIRES)), default="fp32,int8",
        metavar="NAME,...", help="wires (default: %(default)s)")  # fmt: skip
    add("--rounds", type=command.whole_number, default=7, metavar="N",
        help="turns of each training (default: %(default)s)")  # fmt: skip
    add("--steps", type=command.whole_number, default=10, metavar="N",
        help="steps of a turn (default: %(default)s)")  # fmt: skip
    add("--tiny", action="store_true", help="use a toy model, to try the benchmark itself")
    add("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    add("--timeout", type=float, default=300.0, metavar="S",
        help="give up when a turn, or a start, takes longer (seconds; "
        "default: %(default)s)")  # fmt: skip
    return parser


def _measure(arguments: argparse.Namespace, rate: str, processes: int, show: Any) -> Iterator[Row]:
    """Measure all schedules and wires on a link, in turns with a training that sums nothing."""
    model = "tiny" if arguments.tiny else "wide"

    def contestant(way: str, wire: str, algorithm: str) -> FitContestant:
        return FitContestant("plan", way, way, model, processes, wire=wire, algorithm=algorithm)

    with contextlib.ExitStack() as stack:
        network = None
        if rate != _LOOPBACK:
            network = stack.enter_context(link.Network(processes, rate))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tfscale-plan-")))
        seconds = arguments.timeout
        apart = stack.enter_context(
            Crew(contestant("apart", "fp32", "auto"), network, folder, seconds)
        )
        for wire in arguments.wires:
            show(f"{rate}, {processes} processes: the links with {wire}", 0.0)
            with Crew(contestant("scale", wire, "auto"), network, folder, seconds) as crew:
                links = Record(crew.ask(links=1)[0], Path("links"))
            for number, algorithm in enumerate(arguments.algorithms):
                share = number / len(arguments.algorithms)
                show(f"{rate}, {processes} processes: {algorithm}, {wire}", share)
                with Crew(contestant("scale", wire, algorithm), network, folder, seconds) as crew:
                    pairs = [
                        (apart.turn(arguments.steps), crew.turn(arguments.steps))
                        for _ in range(arguments.rounds)
                    ]
                    price = sums(links, algorithm, processes, wire, crew.parameters)
                alone, together = (statistics.median(times) for times in zip(*pairs))
                yield Row(rate, processes, algorithm, wire, together, alone + price)


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


def report(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table, and what the forecasts are worth."""
    lines = ["link      processes  schedule      wire     measured ms  forecast ms  error"]
    lines += [
        f"{row.link:9} {row.processes:<10} {row.algorithm:13} {row.wire:8} "
        f"{1e3 * row.measured:<12.2f} {1e3 * row.forecast:<12.2f} {row.error:.0%}"
        for row in rows
    ]
    errors = [row.error for row in rows]
    middle, worst = statistics.median(errors), max(errors)
    lines.append(f"error of a step: median {middle:.0%}, worst {worst:.0%}")
    for place in sorted({(row.link, row.processes) for row in rows}):
        group = [row for row in rows if (row.link, row.processes) == place]
        chosen = min(group, key=lambda row: row.forecast)
        best = min(group, key=lambda row: row.measured)
        lost = chosen.measured / best.measured - 1
        lines.append(
            f"{place[0]}, {place[1]} processes: the plan chooses {chosen.algorithm} {chosen.wire}, "
            f"which is {lost:.0%} slower than the best ({best.algorithm} {best.wire})"
        )
    return lines
