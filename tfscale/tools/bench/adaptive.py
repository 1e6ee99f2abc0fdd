"""``tfscale bench adaptive``: a method that is chosen live, while links change.

Each contestant trains in processes of its own. The processes keep running while the links between
them get slower and faster. At each rate, the adaptive contestant first trains alone for some time
and tries its methods. Then all contestants take turns, so that a change of the machine's speed
affects all of them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfscale.tools.bench import link, machine, methods
from tfscale.tools.bench.command import (
    bench_parser,
    check_folders,
    ended_by_signals,
    list_of,
    make_console,
    progress,
    whole_number,
)
from tfscale.tools.bench.fit_contestants import FitContestant
from tfscale.tools.bench.fit_crew import Crew
from tfscale.tools.launch import WorkerFailed

if TYPE_CHECKING:
    from rich.table import Table

OFF = "fp32"
FIXED = (OFF, "Wire('int8', True)", "Wire('int4', True)", "PowerSGD(4)", "TopK(0.01)")
RATES = "10gbit,100mbit,1gbit"
LOOKING = 6  # steps of a turn while the adaptive contestant trains alone
SHORTEST = 0.5  # seconds of a turn, which has at least two steps
LARGE = 10_000  # numbers; tables leave out smaller buckets, such as the biases


@dataclasses.dataclass
class AdaptiveResult:
    """Result of a contestant at one rate.

    Attributes:
        chosen: methods in use for the large buckets.
        times: speed compared with the first fixed method: the median of the ratios by round.
    """

    rate: str
    method: str
    chosen: list[str]
    median_ms: float
    times: float
    all_ms: list[float]


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench adaptive``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    console = make_console()
    try:
        for rate in arguments.rates:
            link.bytes_per_second(rate)
        link.check()
        check_folders(arguments.json)
        about = machine.describe()
        with ended_by_signals(), progress(console) as show:
            results = measure(arguments, show)
    except (link.LinkError, WorkerFailed, OSError) as error:
        print(f"tfscale bench: error: {error}", file=sys.stderr)
        return 1
    for rate in arguments.rates:
        console.print(make_table([r for r in results if r.rate == rate], rate))
    for note in notes(results):
        console.print(note, soft_wrap=True)
    console.print(machine.signature(about, "adaptive", argv))
    if arguments.json:
        records = [dataclasses.asdict(each) for each in results]
        arguments.json.write_text(json.dumps({"machine": about, "records": records}, indent=1))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = bench_parser(
        "adaptive",
        "Change the links between processes that train, and compare a method that is "
        "chosen live with fixed methods. Root only.",
    )
    add = parser.add_argument
    add("--rates", type=list_of(str), default=RATES, metavar="RATE,...",
        help="rates of the links, one after the other, in tc's notation "
        "(default: %(default)s)")  # fmt: skip
    add("--adaptive", type=methods.checked, default="Adaptive(1.0)", metavar="METHOD",
        help="the method that is chosen live, with its candidates "
        "(default: %(default)s)")  # fmt: skip
    add(
        "--methods",
        type=methods.checked,
        nargs="+",
        default=list(FIXED),
        metavar="METHOD",
        help="fixed methods; the others are compared with the first (default: %(default)s)",
    )
    add("--processes", type=whole_number, default=2, metavar="P",
        help="processes that train (default: %(default)s)")  # fmt: skip
    add(
        "--model",
        default="wide",
        metavar="NAME",
        help="a model of tfscale bench fit: wide, dense, deep, conv, tiny (default: %(default)s)",
    )
    add("--settle", type=float, default=30.0, metavar="S",
        help="seconds for trying methods after each change (default: %(default)s)")  # fmt: skip
    add("--rounds", type=whole_number, default=5, metavar="N",
        help="turns of each method at each rate (default: %(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    add("--timeout", type=float, default=300.0, metavar="S",
        help="give up when a turn, or a start, takes longer (seconds; "
        "default: %(default)s)")  # fmt: skip
    return parser


def measure(
    arguments: argparse.Namespace, show: Callable[[str, float], None]
) -> list[AdaptiveResult]:
    """Measure all contestants at all rates."""
    names = [*arguments.methods, arguments.adaptive]
    rates, results = arguments.rates, []
    with _crews(names, arguments, show) as (network, crews):
        for number, rate in enumerate(rates):
            network.change(rate)
            shown = (number + 1) / (len(rates) + 1)
            show(f"{rate}: {arguments.adaptive} tries its methods", shown)
            _train_alone(crews[-1], arguments.settle)
            counts = [max(2, round(SHORTEST / crew.turn(2))) for crew in crews]
            turns = []
            for turn in range(arguments.rounds):
                show(f"{rate}: round {turn + 1} of {arguments.rounds}", shown)
                turns.append([crew.turn(count) for crew, count in zip(crews, counts)])
            chosen = [sorted(set(crew.ask(explain=LARGE)[0])) for crew in crews]
            results += _results(rate, names, chosen, list(zip(*turns)))
    return results


@contextlib.contextmanager
def _crews(
    names: Sequence[str], arguments: argparse.Namespace, show: Callable[[str, float], None]
) -> Iterator[tuple[link.Network, list[Crew]]]:
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(link.Network(arguments.processes, arguments.rates[0]))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tfscale-fit-")))
        crews = []
        for name in names:
            show(f"{name} starts", 0.0)
            one = FitContestant(
                "adaptive", name, "scale", arguments.model, arguments.processes, wire=name
            )
            crews.append(stack.enter_context(Crew(one, network, folder, arguments.timeout)))
        yield network, crews


def _train_alone(crew: Crew, seconds: float) -> None:
    while seconds > 0:
        seconds -= LOOKING * crew.turn(LOOKING)


def _results(
    rate: str, names: Sequence[str], chosen: Sequence[list[str]], times: Sequence[Sequence[float]]
) -> list[AdaptiveResult]:
    return [
        AdaptiveResult(
            rate=rate,
            method=name,
            chosen=methods_now,
            median_ms=1e3 * statistics.median(mine),
            times=statistics.median(off / own for off, own in zip(times[0], mine)),
            all_ms=[1e3 * seconds for seconds in mine],
        )
        for name, methods_now, mine in zip(names, chosen, times, strict=True)
    ]


def notes(results: Sequence[AdaptiveResult]) -> Iterator[str]:
    """Yield for each rate a comparison of the live choice with the best and the first fixed method.

    Ratios are medians over rounds.
    """
    for rate in dict.fromkeys(each.rate for each in results):
        *fixed, live = (each for each in results if each.rate == rate)
        best = min(fixed, key=lambda each: each.median_ms)
        yield (
            f"{rate}: {', '.join(live.chosen)}; a step takes {_step_ratio(live, best):.2f} times "
            f"as long as with the best fixed method ({best.method}), "
            f"{_step_ratio(live, fixed[0]):.2f} times as long as with {fixed[0].method}"
        )


def _step_ratio(one: AdaptiveResult, other: AdaptiveResult) -> float:
    return statistics.median(mine / its for mine, its in zip(one.all_ms, other.all_ms))


def make_table(results: Sequence[AdaptiveResult], rate: str) -> Table:
    """Return the table of one rate."""
    from rich import box
    from rich.table import Table

    title = f"fit with links of {rate}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for name in ("ms", "times"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("in use")
    for each in results:
        chosen = ", ".join(each.chosen)
        table.add_row(each.method, f"{each.median_ms:.4g}", f"{each.times:.2f}x", chosen)
    return table
