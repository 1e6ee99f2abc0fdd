"""Part ``workers`` of ``tfscale bench mach``: repetitions per hour of one worker and of several.

Each run is ``tfscale launch`` with the same program. A run of several workers gets a network
namespace of its own, whose only interface is the loopback. So the counters of that interface hold
all bytes that the workers have sent to each other, and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfscale.tools.bench.mach_worker import Load
from tfscale.tools.bench.run import Show
from tfscale.tools.bench.table import new_table
from tfscale.tools.launch.machine import cores, part

SECONDS = 3600  # limit of a run
_PROGRAM = "tfscale.tools.bench.mach_worker"
_COUNTED = 'ip link set lo up && "$@" && cat /proc/net/dev > "$0"'


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of ``tfscale launch``.

    Attributes:
        name: what the table calls it.
        workers: number of workers.
        cores: the processor cores that all workers together may use.
    """

    name: str
    workers: int
    cores: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rate:
    """Result of the runs with one name.

    Attributes:
        name: what the table calls it.
        per_hour: repetitions per hour, of each round.
        processor: processor time of a repetition, in seconds, of each round.
        sent: bytes that the workers sent to each other in all rounds; None if not counted.
    """

    name: str
    per_hour: list[float]
    processor: list[float]
    sent: int | None


def runs(workers: int) -> list[Run]:
    """Return the runs: one worker with one worker's share of the cores or all, and several."""
    everything = cores()
    share = part(everything, 0, workers)
    return [
        Run(f"1 worker, {len(share)} core{'s' * (len(share) > 1)}", 1, tuple(share)),
        Run(f"1 worker, {len(everything)} cores", 1, tuple(everything)),
        Run(f"{workers} workers, {len(everything)} cores", workers, tuple(everything)),
    ]


def measure(load: Load, workers: int, rounds: int, show: Show) -> list[Rate]:
    """Return the rates of all runs, which take turns; each second round runs backwards."""
    planned = runs(workers)
    rates = [Rate(run.name, [], [], None) for run in planned]
    for number in range(rounds):
        places = range(len(planned)) if number % 2 == 0 else reversed(range(len(planned)))
        for step, place in enumerate(places):
            done = (number + step / len(planned)) / rounds
            show(f"round {number + 1} of {rounds}: {planned[place].name}", done)
            rates[place] = _joined(rates[place], _rate_of(planned[place], load))
    return rates


def _joined(rate: Rate, other: Rate) -> Rate:
    sent = None if other.sent is None else (rate.sent or 0) + other.sent
    per_hour, processor = rate.per_hour + other.per_hour, rate.processor + other.processor
    return Rate(rate.name, per_hour, processor, sent)


def can_count() -> bool:
    """Return whether this process may make network namespaces."""
    tools = all(shutil.which(tool) for tool in ("unshare", "ip"))
    return (
        tools and not subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode
    )


def make_table(rates: Sequence[Rate], load: Load) -> Any:
    """Return the table that users see."""
    title = (
        f"{load.repetitions} repetitions of {load.steps} steps, B={load.buckets}, median of "
        f"{len(rates[0].per_hour)} rounds"
    )
    rate_columns = "repetitions/hour", "times the first", "times the second"
    numbers = *rate_columns, "processor s each", "bytes sent"
    table = new_table(title, ["run"], numbers, pad_edge=False)
    for rate in rates:
        table.add_row(
            rate.name, f"{statistics.median(rate.per_hour):,.0f}",
            *[f"{_ratio(rate, other):.2f}" for other in rates[:2]],
            f"{statistics.median(rate.processor):.1f}",
            "not counted" if rate.sent is None else f"{rate.sent:,}",
        )  # fmt: skip
    return table


def _ratio(one: Rate, other: Rate) -> float:
    """Return the median over the rounds of the ratio within a round."""
    pairs = zip(one.per_hour, other.per_hour, strict=True)
    return statistics.median(a / b for a, b in pairs)


def _rate_of(run: Run, load: Load) -> Rate:
    """Return the result of one run."""
    with tempfile.TemporaryDirectory(prefix="tfscale-mach-") as name:
        folder, options = Path(name), json.dumps(dataclasses.asdict(load))
        launch = [sys.executable, "-m", "tfscale", "launch", "-n", str(run.workers), "--bind"]
        command = [*launch, "-m", _PROGRAM, name, options]
        counters = folder / "counters"
        if can_count():
            command = ["unshare", "--net", "sh", "-c", _COUNTED, str(counters), *command]
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False,
            preexec_fn=lambda: os.sched_setaffinity(0, run.cores),
        )  # fmt: skip
        if ran.returncode:
            raise RuntimeError(f"{run.name}: {(ran.stderr or ran.stdout).strip()[-2000:]}")
        reports = [json.loads(path.read_text()) for path in folder.glob("worker-*.json")]
        seconds = max(r["end"] for r in reports) - min(r["begin"] for r in reports)
        trained = sum(report["repetitions"] for report in reports)
        processor = sum(report["processor"] for report in reports) / trained
        sent = bytes_sent(counters.read_text()) if counters.exists() else None
    return Rate(run.name, [3600 * trained / seconds], [processor], sent)


def bytes_sent(counters: str) -> int:
    """Return the bytes that all interfaces have sent, from the text of ``/proc/net/dev``."""
    rows = [line.split(":")[1].split() for line in counters.splitlines() if ":" in line]
    return sum(int(row[8]) for row in rows)
