"""``tfscale bench plan``: forecasts of steps against measured steps.

For each link and number of processes, ``fit`` trains a model by several schedules and wires, and in
several layouts. The forecasts use measured links and layers, and no training of the same kind.
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
from tfscale.tools.bench import command, link, machine, plan_layouts, plan_schedules
from tfscale.tools.bench.holding import HoldError
from tfscale.tools.launch import WorkerFailed

_LOOPBACK = "memory"  # processes of one machine, over shared memory
PARTS = {"schedules": plan_schedules.measured, "layouts": plan_layouts.measured}


@dataclasses.dataclass(frozen=True)
class Row:
    """A forecast and its measurement.

    Args:
        part: what was compared: a key of ``PARTS``.
        link: rate of the links, or ``"memory"``.
        processes: number of processes.
        name: a schedule and a wire, or a layout.
        measured: median seconds of a step.
        forecast: seconds that the planner says.
    """

    part: str
    link: str
    processes: int
    name: str
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
    except (link.LinkError, HoldError, WorkerFailed, ImportError, OSError) as error:
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
    parser = command.bench_parser(
        "plan",
        "Compare forecasts of steps with measured steps.",
        epilog="See docs/plan.md for what is priced, and how.",
    )
    add = parser.add_argument
    add("--parts", type=command.list_of(command.one_of(PARTS)), default=",".join(PARTS),
        metavar="PART,...", help="what to compare: schedules and wires of gradients, layouts of "
        "the model (default: %(default)s)")  # fmt: skip
    add("--model", choices=("wide", "deep", "stack"), default="wide",
        help="three layers of 3 million parameters, a VGG-like network, or six layers of 25 "
        "million (default: %(default)s)")  # fmt: skip
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
    add("--slow", type=float, default=1.0, metavar="FACTOR",
        help="how many times slower the first process is in the part layouts (a cgroup, root only; "
        "default: %(default)s)")  # fmt: skip
    add("--tiny", action="store_true", help="use a toy model, to try the benchmark itself")
    add("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    add("--timeout", type=float, default=300.0, metavar="S",
        help="give up when a turn, or a start, takes longer (seconds; "
        "default: %(default)s)")  # fmt: skip
    return parser


def _measure(arguments: argparse.Namespace, rate: str, processes: int, show: Any) -> Iterator[Row]:
    """Measure all parts on a link."""
    model = "tiny" if arguments.tiny else arguments.model
    with contextlib.ExitStack() as stack:
        network = None
        if rate != _LOOPBACK:
            network = stack.enter_context(link.Network(processes, rate))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tfscale-plan-")))
        for part in arguments.parts:

            def told(what: str, share: float) -> None:
                show(f"{rate}, {processes} processes: {what}", share)

            found = PARTS[part](arguments, model, processes, network, folder, told)
            for name, seconds, forecast in found:
                yield Row(part, rate, processes, name, seconds, forecast)


def report(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table, and what the forecasts are worth."""
    width = max(len(row.name) for row in rows)
    lines = [f"link      processes  {'step':{width}}  measured ms  forecast ms  error"]
    lines += [
        f"{row.link:9} {row.processes:<10} {row.name:{width}}  {1e3 * row.measured:<12.2f} "
        f"{1e3 * row.forecast:<12.2f} {row.error:.0%}"
        for row in rows
    ]
    errors = [row.error for row in rows]
    middle, worst = statistics.median(errors), max(errors)
    lines.append(f"error of a step: median {middle:.0%}, worst {worst:.0%}")
    for part, place, processes in sorted({(row.part, row.link, row.processes) for row in rows}):
        group = [r for r in rows if (r.part, r.link, r.processes) == (part, place, processes)]
        chosen = min(group, key=lambda row: row.forecast)
        best = min(group, key=lambda row: row.measured)
        lost = chosen.measured / best.measured - 1
        lines.append(
            f"{part}, {place}, {processes} processes: the plan chooses {chosen.name}, which is "
            f"{lost:.0%} slower than the best ({best.name})"
        )
    return lines
