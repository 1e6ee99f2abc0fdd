"""Command line of ``tfscale bench allreduce``, and helpers that all benchmarks share."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from tfscale.collectives import ALGORITHMS
from tfscale.collectives.wires import WIRES
from tfscale.native import memory
from tfscale.support import figures
from tfscale.tools.bench import link, machine
from tfscale.tools.bench.assignment import IN_OUR_WORKERS, STOCK, TRANSPORTS, Contestant
from tfscale.tools.bench.run import Outcome, Request, Show, run
from tfscale.tools.bench.table import make_table, pays_for_pages
from tfscale.tools.launch import WorkerFailed

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench allreduce``; return the exit status."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    request = read(arguments)
    console = make_console()
    try:
        if request.link:
            link.bytes_per_second(request.link)
            link.check()
        if arguments.plot:
            figures.check_matplotlib()
        check_folders(arguments.json, arguments.plot)
        about = machine.describe()
        with ended_by_signals(), progress(console) as show:
            outcome = run(request, show)
    except (link.LinkError, WorkerFailed, ImportError, OSError) as error:
        print(f"tfscale bench: error: {error}", file=sys.stderr)
        return 1
    line = shlex.join(["tfscale", "bench", *argv])
    report(console, request, outcome, about, line)
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(request, outcome, about, line), indent=1))
        console.print(f"numbers: {arguments.json}")
    if arguments.plot:
        _plot(request, outcome, about, arguments.plot)
        console.print(f"picture: {arguments.plot}")
    return 0 if all(r.same_bits for r in outcome.records if r.algorithm not in STOCK) else 1


# ---------------------------------------------------------------------------
# Options.


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench allreduce``."""
    parser = bench_parser(
        "allreduce",
        "Measure all-reduces between processes of this machine.",
        epilog="See docs/benchmarks.md for what the columns mean.",
    )
    add = parser.add_argument
    add("what", nargs="?", default="allreduce", choices=["allreduce"],
        help="what to measure; `tfscale bench --help` lists other benches")  # fmt: skip
    add("--sizes", type=list_of(whole_number), default="1e3,1e5,1e6,1e7", metavar="N,...",
        help="counts of float32 numbers (default: %(default)s)")  # fmt: skip
    add("--algorithms", type=list_of(one_of(ALGORITHMS)), default="ring,direct", metavar="NAME,...",
        help=f"some of {', '.join(ALGORITHMS)} (default: %(default)s)")  # fmt: skip
    add("--wires", type=list_of(one_of(WIRES)), default="fp32,int8", metavar="NAME,...",
        help=f"some of {', '.join(WIRES)} (default: %(default)s)")  # fmt: skip
    add("--transports", type=list_of(one_of(TRANSPORTS)), default="sockets", metavar="NAME,...",
        help="some of sockets, tcp (sockets without shared memory) and grpc (TensorFlow's own) "
        "(default: %(default)s)")  # fmt: skip
    add("--processes", type=list_of(_processes), default="2,4", metavar="P,...",
        help="numbers of processes that take part (default: %(default)s)")  # fmt: skip
    add("--piece-bytes", type=list_of(_bytes), default="0", metavar="BYTES,...",
        help="bytes of a message, such as 65536, 64K or 1M; 0 lets the engine choose "
        "(default: %(default)s)")  # fmt: skip
    add("--against", type=list_of(one_of([*STOCK, "none"])), default="tf", metavar="NAME,...",
        help="what to measure besides tfscale: tf (stock MultiWorkerMirroredStrategy), gloo "
        "(torch), mpi (mpi4py), horovod, nothing (a function that exchanges nothing: the time of "
        "TensorFlow's call), or none (default: %(default)s)")  # fmt: skip
    add("--repeats", type=whole_number, default=0, metavar="N",
        help="rounds per size (default: as many as --seconds allows, 5 to 40)")  # fmt: skip
    add("--seconds", type=float, default=2.0, metavar="S",
        help="approximate time for each contestant at each size "
        "(default: %(default)s)")  # fmt: skip
    add("--link", metavar="RATE",
        help="network ports of this rate, in tc's notation (1gbit); root only")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    add("--plot", type=Path, metavar="FILE", help="draw time against size (png, svg or pdf)")
    add("--rival-python", default=sys.executable, metavar="PATH",
        help="the Python interpreter that has torch, mpi4py or horovod "
        "(default: this one)")  # fmt: skip
    add("--timeout", type=float, default=600.0, metavar="S",
        help="give up when one set of processes takes longer (seconds; "
        "default: %(default)s)")  # fmt: skip
    return parser


def read(arguments: argparse.Namespace) -> Request:
    """Return a request for all combinations of algorithms, wires, message sizes and transports."""
    combinations = itertools.product(
        arguments.algorithms, arguments.wires, arguments.piece_bytes, arguments.transports
    )
    return Request(
        sizes=arguments.sizes,
        contestants=tuple(Contestant(*each) for each in combinations),
        processes=arguments.processes,
        against=tuple(name for name in arguments.against if name != "none"),
        repeats=arguments.repeats,
        seconds=arguments.seconds,
        link=arguments.link,
        timeout=arguments.timeout,
        rival_python=arguments.rival_python,
    )


def bench_parser(name: str, description: str, **how: Any) -> argparse.ArgumentParser:
    """Return a parser without options for ``tfscale bench NAME``."""
    return argparse.ArgumentParser(
        prog=f"tfscale bench {name}", description=description, allow_abbrev=False, **how
    )


def answer_of_process(bench: str, words: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Run ``tfscale bench BENCH WORDS`` in a new process; return the JSON in its last line."""
    ran = subprocess.run(
        [sys.executable, "-m", "tfscale", "bench", bench, *words],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip().rpartition("\n")[2])
    return json.loads(ran.stdout.strip().splitlines()[-1])


def list_of(one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return an argparse type for words that are separated by commas; ``one`` reads each word."""

    def many(text: str) -> tuple[T, ...]:
        return tuple(dict.fromkeys(one(word.strip()) for word in text.split(",")))

    return many


def whole_number(text: str) -> int:
    """Read a whole number above 0, such as 1000 or 1e6; an argparse type."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0 (1000, 1e6)")
    return int(number)


def _processes(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 200:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes from 2 to 200")
    return int(text)


def _bytes(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    digits = text if unit == 1 else text[:-1]
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes (65536, 64K, 1M)")
    return int(digits) * unit


def one_of(names: Sequence[str] | dict[str, Any]) -> Callable[[str], str]:
    """Return an argparse type that accepts one of these names."""

    def one(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return one


# ---------------------------------------------------------------------------
# Output.


def make_console() -> Console:
    """Return a console; without a terminal, it is 120 characters wide, enough for the tables."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    return console


@contextmanager
def progress(console: Console) -> Iterator[Show]:
    """Show progress in one line, which vanishes at the end."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, share: bar.update(task, description=text, completed=share)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into ``SystemExit``, so that they clean up as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    both = signal.SIGTERM, signal.SIGHUP
    numbers = [number for number in both if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def report(
    console: Console, request: Request, outcome: Outcome, about: dict[str, Any], line: str
) -> None:
    """Print the tables, and the lines below them."""
    for processes in request.processes:
        records = [record for record in outcome.records if record.processes == processes]
        title = f"all-reduce of float32, {processes} processes, {where(request)}"
        console.print(make_table(records, title))
    for note in footer(request, outcome, about, line):
        console.print(note, soft_wrap=True)


def where(request: Request) -> str:
    """Return a description of the links between the processes."""
    return f"{request.link} links" if request.link else "127.0.0.1"


def footer(request: Request, outcome: Outcome, about: dict[str, Any], line: str) -> list[str]:
    """Return the lines below the tables: meaning of the numbers, machine, warnings, command."""
    sockets = ", ".join(
        f"{rate / 1e6:,.0f} MB/s with {p} processes" for p, rate in outcome.socket_rates.items()
    )
    if request.link:
        bound = (
            f"bound: 2(P-1)/P x bytes on the wire / {request.link}; bare sockets reach {sockets}; "
            f"after a pause, up to {link.burst(request.link) / 1e3:.0f} kB pass without a limit"
        )
    else:
        bound = (
            "bound: 2(P-1)/P x bytes on the wire / rate of bare TCP sockets while all ranks send "
            f"and receive at once: {sockets}. It leaves out arithmetic; shared memory can beat it"
        )
    time = (
        "time: median over rounds of the slowest rank; cpu: sum over all ranks; page faults: "
        "average over ranks; tf takes turns with the others"
    )
    rivals = [name for name in request.against if name not in IN_OUR_WORKERS]
    lines = [bound, time + (f"; {' and '.join(rivals)} before and after" if rivals else "")]
    lines.append(machine.line(about))
    warning = machine.warning(about, max(request.processes))
    lines += [f"warning: {warning}"] if warning else []
    slow = [record for record in outcome.records if pays_for_pages(record)]
    if slow:
        names = ", ".join(dict.fromkeys(record.contestant for record in slow))
        lines.append(
            f"warning: {names} spend most of their time on fresh memory pages: the times of large "
            "buffers say little about a machine that keeps its pages. " + memory.ADVICE
        )
    return [*lines, *outcome.notes, f"command: {line}"]


def as_json(request: Request, outcome: Outcome, about: dict[str, Any], line: str) -> dict[str, Any]:
    """Return all results as they stand in the file of ``--json``."""
    return {
        "command": line,
        "machine": about,
        "link": request.link,
        "socket_bytes_per_second": {str(p): rate for p, rate in outcome.socket_rates.items()},
        "notes": outcome.notes,
        "records": [dataclasses.asdict(record) for record in outcome.records],
    }


def check_folders(*files: Path | None) -> None:
    """Raise ``OSError`` if a file cannot be written, before minutes of measurements are lost."""
    for file in files:
        if file is not None and not os.access(file.absolute().parent, os.W_OK):
            raise OSError(
                f"cannot write {file}: its folder does not exist or is read-only; give another path"
            )


def _plot(request: Request, outcome: Outcome, about: dict[str, Any], path: Path) -> None:
    from tfscale.tools.bench import plot

    title = f"all-reduce, {where(request)}; {about['cpu']}, {about['cores']} cores"
    plot.draw(outcome.records, title).savefig(os.fspath(path), dpi=120)
