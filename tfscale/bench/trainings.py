"""What benchmarks of learning share: one training after another."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfscale.bench import machine
from tfscale.bench.command import check_folders, make_console, progress

if TYPE_CHECKING:
    from rich.table import Table


def compare(
    name: str,
    argv: Sequence[str],
    arguments: argparse.Namespace,
    train_all: Callable[[argparse.Namespace, Any], Iterator[Any]],
    tables: Callable[[Sequence[Any]], Iterable[Table]],
    words: str,
) -> int:
    """Train, show the tables, and write all to ``arguments.json``; returns the exit status.

    Args:
        name: of the benchmark.
        argv: what the user typed.
        arguments: what it means.
        train_all: yields a dataclass for each training, and is given what shows progress.
        tables: of all trainings.
        words: what the tables' numbers are.
    """
    about = machine.describe()
    console = make_console()
    start = time.monotonic()
    try:
        check_folders(arguments.json)
        with progress(console) as show:
            trained = list(train_all(arguments, show))
    except (ImportError, OSError) as error:
        print(f"tfscale bench: error: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - start
    for table in tables(trained):
        console.print(table)
    console.print(
        f"mean ± standard deviation of {arguments.seeds} seeds; {words}; {seconds:.0f} s\n"
        f"machine: {about['cpu']}, {about['cores']} cores; TensorFlow {about['tensorflow']}; "
        f"tfscale {about['tfscale']}\n"
        f"command: {shlex.join(['tfscale', 'bench', name, *argv])}",
        soft_wrap=True,
    )
    if arguments.json:
        found = [dataclasses.asdict(run) for run in trained]
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0


def spread(numbers: Sequence[float], how: str) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
    return f"{statistics.mean(numbers):{how}} ± {deviation:{how.lstrip('+')}}"
