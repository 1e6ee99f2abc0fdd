"""``tfscale bench fit``: training with this strategy, with TensorFlow's, and without a strategy."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfscale.collectives.wires import WIRES as ALL_WIRES
from tfscale.support import figures
from tfscale.tools.bench import command, fit_trace, link, machine, methods
from tfscale.tools.bench.fit_contestants import (
    METHODS,
    PARTS,
    REPLICAS,
    RULES,
    USUAL_PARTS,
    WIRES,
    FitContestant,
    contestants,
)
from tfscale.tools.bench.fit_crew import Crew
from tfscale.tools.bench.fit_table import (
    FitResult,
    behind_steps,
    conclude,
    exposed,
    hidden_share,
    make_table,
    sent_less,
)
from tfscale.tools.launch import WorkerFailed

MOST_STEPS = 100  # steps of a turn, at most
TRACED_STEPS = 3


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench fit``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    console = command.make_console()
    try:
        if arguments.link:
            link.bytes_per_second(arguments.link)
            link.check()
        if arguments.plot or arguments.trace:
            figures.check_matplotlib()
        command.check_folders(arguments.json, arguments.plot, arguments.trace)
        about = machine.describe()
        with command.ended_by_signals(), command.progress(console) as show:
            bench = Bench(arguments, show)
            records = [record for part in arguments.parts for record in bench.measure(part)]
    except (link.LinkError, WorkerFailed, ImportError, OSError) as error:
        print(f"tfscale bench: error: {error}", file=sys.stderr)
        return 1
    words = shlex.join(["tfscale", "bench", "fit", *argv])
    for part in arguments.parts:
        console.print(make_table([r for r in records if r.part == part], _title(part, arguments)))
    for note in footer(records, bench.timelines, about, words):
        console.print(note, soft_wrap=True)
    write(arguments, records, about, words, bench.timelines)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench fit``."""
    parser = command.bench_parser(
        "fit",
        "Measure the training of Keras models.",
        epilog="See docs/benchmarks/training.md for what is compared with what.",
    )
    add = parser.add_argument
    add(
        "--parts",
        type=command.list_of(command.one_of(PARTS)),
        default=",".join(USUAL_PARTS),
        metavar="NAME,...",
        help="one: a single device; devices: 2 and 4 logical devices of one "
        "process; workers: 2 processes and 25M parameters; overlap: which share of the exchange "
        "the backward pass hides; methods: 25M parameters with several methods; rules: 25M "
        "parameters with several sync rules; sharding: 25M parameters with Adam, with copies and "
        "with parts of its state (default: the first four)",
    )
    add(
        "--methods",
        type=methods.checked,
        nargs="+",
        default=list(METHODS),
        metavar="METHOD",
        help="wires, or methods such as 'PowerSGD(4)', for the part methods; all are compared "
        "with the first (default: %(default)s)",
    )
    add(
        "--rules",
        type=methods.checked_rule,
        nargs="+",
        default=list(RULES),
        metavar="RULE",
        help="sync rules for the part rules, such as \"DiLoCo(100, wire='int8')\"; all are "
        "compared with the first (default: %(default)s)",
    )
    add("--processes", type=command.whole_number, default=REPLICAS, metavar="P",
        help="processes of methods, rules and sharding (default: %(default)s)")  # fmt: skip
    add("--wires", type=command.list_of(command.one_of(ALL_WIRES)), default=",".join(WIRES),
        metavar="NAME,...", help="wires of the part workers (default: %(default)s)")  # fmt: skip
    add("--against", type=command.list_of(command.one_of(["horovod"])), default=[],
        metavar="NAME,...", help="horovod: also measure Horovod in the part workers; needs "
        "Horovod in this Python (TensorFlow 2.15), and mpirun")  # fmt: skip
    add("--rounds", type=command.whole_number, default=15, metavar="N",
        help="turns of each contestant (default: %(default)s)")  # fmt: skip
    add("--seconds", type=float, default=1.0, metavar="S",
        help="approximate time of a turn, which has at least 2 steps (default: %"
        "(default)s)")  # fmt: skip
    add("--link", metavar="RATE",
        help="rate of the network ports between processes, such as 1gbit; root only")  # fmt: skip
    add("--tiny", action="store_true", help="use toy models, to try the benchmark itself")
    add("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    add("--plot", type=Path, metavar="FILE", help="draw steps per second (png, svg or pdf)")
    add("--trace", type=Path, metavar="FILE.json",
        help="write some steps of the part overlap to FILE.json, for Perfetto or "
        "chrome://tracing, and draw one of them in FILE.png")  # fmt: skip
    add("--timeout", type=float, default=300.0, metavar="S",
        help="give up when a turn, or a start, takes longer (seconds; "
        "default: %(default)s)")  # fmt: skip
    return parser


class Bench:
    """Measurement of several parts, one after the other; the contestants of a part take turns."""

    def __init__(self, arguments: argparse.Namespace, show: Callable[[str, float], None]) -> None:
        self.arguments, self.show = arguments, show
        self.timelines: list[fit_trace.RankTimeline] = []

    def measure(self, part: str) -> list[FitResult]:
        """Measure one part: group after group of contestants with equal processes and devices."""
        of = self.arguments
        planned = contestants(
            part, of.wires, of.tiny, of.against, of.methods, of.rules, of.processes
        )
        groups = sorted({(each.processes, each.devices) for each in planned})
        return [
            record
            for group in groups
            for record in self._group([c for c in planned if (c.processes, c.devices) == group])
        ]

    def _group(self, group: Sequence[FitContestant]) -> list[FitResult]:
        with contextlib.ExitStack() as stack:
            processes, rate, network = group[0].processes, self.arguments.link, None
            if rate is not None and processes > 1:
                network = stack.enter_context(link.Network(processes, rate))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tfscale-fit-")))
            crews = []
            for number, contestant in enumerate(group):
                self.show(f"{contestant.part}: {contestant.name} starts", number / len(group) / 2)
                crew = Crew(contestant, network, folder, self.arguments.timeout)
                crews.append(stack.enter_context(crew))
            records = self._take_turns(group, crews)
            if group[0].part == "overlap" and self.arguments.trace:
                ours = next(c for c, one in zip(crews, group, strict=True) if one.way == "scale")
                found = [fit_trace.taken(each) for each in ours.ask(trace=TRACED_STEPS)]
                self.timelines = sorted(found, key=lambda timeline: timeline.rank)
        return records

    def _count(self, contestant: FitContestant, crew: Crew) -> int:
        """Return the number of timed steps in a turn: those of a round for a rule; at least two."""
        if contestant.part == "rules":
            return max(2, _steps_of_round(contestant.rule))
        return _steps(self.arguments.seconds, crew.turn(2))

    def _take_turns(self, group: Sequence[FitContestant], crews: Sequence[Crew]) -> list[FitResult]:
        counts = [self._count(each, crew) for each, crew in zip(group, crews, strict=True)]
        times: list[list[float]] = [[] for _ in crews]
        for number in range(self.arguments.rounds):
            share = 0.5 + number / self.arguments.rounds / 2
            self.show(f"{group[0].part}: round {number + 1} of {self.arguments.rounds}", share)
            for crew, count, mine in zip(crews, counts, times, strict=True):
                mine.append(crew.turn(count))
        records = conclude(group, [crew.parameters for crew in crews], counts, times)
        for record, crew in zip(records, crews, strict=True):
            faults, peaks = zip(*crew.ask(memory=1), strict=True)
            record.faults, record.peak_mb = statistics.mean(faults), max(peaks)
        if group[0].part == "sharding":
            for record, crew, count in zip(records, crews, counts, strict=True):
                record.sent_per_step = max(crew.ask(sent=count)) / count
        if group[0].part == "rules":
            for record, crew, count in zip(records, crews, counts, strict=True):
                rule = methods.rounds_of(record.contestant)
                record.sent_per_step = max(crew.ask(sent=count)) / (count - rule.delay)
                waited, took = max(crew.ask(behind=count))
                record.hidden = 1 - waited / took if took else None
        return records


def _steps_of_round(rule: str) -> int:
    """Return the steps of a rule's round, and those until its background exchange has ended."""
    made = methods.rounds_of(rule)
    if not isinstance(made.every, int):
        raise ValueError(f"{rule}: this benchmark needs a whole number for `every`")
    return made.every + made.delay


def _steps(seconds: float, once: float) -> int:
    return min(MOST_STEPS, max(2, round(seconds / once)))


# ---------------------------------------------------------------------------
# Output.


def _title(part: str, arguments: argparse.Namespace) -> str:
    between = f"{REPLICAS} processes, {arguments.link or '127.0.0.1'}"
    return {
        "one": "fit on one device",
        "devices": "fit on logical devices of one process",
        "workers": f"fit of a model bound by communication, {between}",
        "overlap": f"fit of a model bound by computation, {between}",
        "methods": f"fit of a model bound by communication, {arguments.processes} processes, "
        f"{arguments.link or '127.0.0.1'}",
        "rules": f"fit of a model bound by communication, {arguments.processes} processes, "
        f"{arguments.link or '127.0.0.1'}",
        "sharding": f"fit with Adam, {arguments.processes} processes, "
        f"{arguments.link or '127.0.0.1'}",
    }[part]


def footer(
    records: Sequence[FitResult],
    timelines: Sequence[fit_trace.RankTimeline],
    about: dict[str, Any],
    words: str,
) -> list[str]:
    """Return the lines below the table: meaning of the numbers, shares, machine, command."""
    lines = ["ms: median over rounds of a step of the slowest process; "
             "times: speed compared with the first contestant, median over rounds"]  # fmt: skip
    share = hidden_share(records)
    if share is not None:
        lines.append(f"the backward pass hides {share:.0%} of the exchange")
    for name, added, less in exposed(records):
        lines.append(f"a step waits for communication: {name} {added:.1f} ms, {less:.2f}x less")
    for name, sent, less in sent_less(records):
        lines.append(f"a replica sends in a step: {name} {sent / 1e6:.3f} MB, {less:.1f}x less")
    for name, hidden in behind_steps(records):
        lines.append(f"in the background: {name} {hidden:.0%} of its exchange")
    if timelines:
        seconds = 1e3 * fit_trace.exposed_seconds(timelines)
        lines.append(
            f"trace: for {seconds:.1f} ms of a step, gradients travel while nothing computes"
        )
    lines.append(machine.line(about))
    warning = machine.warning(about, max(record.processes for record in records))
    return [*lines, *([f"warning: {warning}"] if warning else []), f"command: {words}"]


def write(
    arguments: argparse.Namespace,
    records: Sequence[FitResult],
    about: dict[str, Any],
    words: str,
    timelines: Sequence[fit_trace.RankTimeline],
) -> None:
    """Write the files that the options ask for."""
    if arguments.json:
        whole = {
            "command": words,
            "machine": about,
            "link": arguments.link,
            "hidden_share": hidden_share(records),
            "records": [dataclasses.asdict(record) for record in records],
        }
        arguments.json.write_text(json.dumps(whole, indent=1))
    if arguments.plot:
        from tfscale.tools.bench import fit_plot

        fit_plot.draw(records).savefig(os.fspath(arguments.plot), dpi=120)
    if timelines:
        arguments.trace.write_text(json.dumps(fit_trace.chrome(timelines)))
        picture = fit_trace.draw(timelines)
        picture.savefig(os.fspath(arguments.trace.with_suffix(".png")), dpi=120)
