"""``tfscale bench mach``: MACH, full softmax and sampled softmax learn a task in equal time.

Other parts measure the search for the best classes, and repetitions per hour of several workers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfscale.tools.bench import definitions, mach_search, mach_workers, machine, spelling
from tfscale.tools.bench.command import (
    bench_parser,
    list_of,
    make_console,
    one_of,
    progress,
    whole_number,
)
from tfscale.tools.bench.mach_task import CLOCKS, Result, Task
from tfscale.tools.bench.mach_worker import Load
from tfscale.tools.bench.table import new_table

PARTS = ("task", "search", "workers")
CONTESTANTS = ("mach", "shared", "full", "sampled")
TASKS = {"spelling": spelling.load, "definitions": definitions.load}


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench mach``; return the exit status."""
    options = make_parser().parse_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    about, console = machine.describe(), make_console()
    found: dict[str, Any] = {}
    try:
        for part in options.parts:
            found[part] = _RUN[part](options, console)
    except (OSError, RuntimeError) as error:
        print(f"tfscale bench: error: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    console.print(machine.signature(about, "mach", argv))
    return 0


def _task(options: argparse.Namespace, console: Any) -> list[dict[str, Any]]:
    if options.threads:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(options.threads)
        tf.config.threading.set_inter_op_parallelism_threads(options.threads)
    task = Task(TASKS[options.task](options.words, options.one_in), options)
    results = [result for name in options.contestants for result in task.run(name)]
    console.print(make_table(results, task))
    return [dataclasses.asdict(result) for result in results]


def _search(options: argparse.Namespace, console: Any) -> list[dict[str, Any]]:
    found = mach_search.measure(options.classes, options.repetitions, options.buckets)
    for each in found:
        console.print(mach_search.in_words(each))
    return [dataclasses.asdict(each) for each in found]


def _workers(options: argparse.Namespace, console: Any) -> list[dict[str, Any]]:
    words = None if options.words is None else str(options.words.absolute())
    load = Load(
        words, options.one_in, options.buckets, options.repetitions, options.width, options.batch,
        options.steps,
    )  # fmt: skip
    with progress(console) as show:
        rates = mach_workers.measure(load, options.workers, options.rounds, show)
    console.print(mach_workers.make_table(rates, load))
    return [dataclasses.asdict(rate) for rate in rates]


_RUN = {"task": _task, "search": _search, "workers": _workers}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench mach``."""
    parser = bench_parser(
        "mach", "Compare MACH with full and sampled softmax; measure its search and workers."
    )
    add = parser.add_argument
    add("--parts", type=list_of(one_of(PARTS)), default="task", metavar="NAME,...",
        help="task: contestants learn a task; search: the ten best of many classes; workers: "
        "repetitions per hour of one worker and several (default: %(default)s)")  # fmt: skip
    add("--task", choices=list(TASKS), default="spelling",
        help="repair of misspelt words, or the entry of a definition (default: "
        "%(default)s)")  # fmt: skip
    add("--contestants", type=list_of(one_of(CONTESTANTS)), metavar="NAME,...",
        default=",".join(CONTESTANTS), help="some of mach, shared (MACH with a shared trunk), "
        "full (softmax), sampled (softmax) (default: %(default)s)")  # fmt: skip
    add("--words", type=Path, metavar="PATH",
        help="list of words (default: Debian's largest, or symspellpy's), or WordNet's "
        "folder")  # fmt: skip
    add("--one-in", type=whole_number, default=1, metavar="N", help="take one class in N")
    add("--clock", choices=list(CLOCKS), default="wall",
        help="what seconds are: the processor's if others use the machine (default: "
        "%(default)s)")  # fmt: skip
    add("--serve", action="store_true", help="also measure MACH's exported models")
    add("--seconds", type=float, default=120.0, metavar="S",
        help="training of each contestant (default: %(default)s)")  # fmt: skip
    add("--buckets", type=whole_number, default=1024, metavar="B", help="(default: %(default)s)")
    add("--repetitions", type=whole_number, default=4, metavar="R", help="(default: %(default)s)")
    add("--width", type=whole_number, default=256, metavar="N",
        help="inputs of the last layer (default: %(default)s)")  # fmt: skip
    add("--table", type=whole_number, default=spelling.TABLE, metavar="N",
        help="columns of the table of inputs (default: %(default)s)")  # fmt: skip
    add("--precision", choices=("float32", "bfloat16"), default="float32",
        help="what dense layers multiply; bfloat16 is fast on processors with AMX (default: "
        "%(default)s)")  # fmt: skip
    add("--threads", type=whole_number, metavar="N",
        help="threads of TensorFlow in the part task (default: TensorFlow's)")  # fmt: skip
    add("--batch", type=whole_number, default=256, metavar="N", help="(default: %(default)s)")
    add("--samples", type=whole_number, default=1024, metavar="N",
        help="classes that sampled softmax draws in a step (default: %(default)s)")  # fmt: skip
    add("--classes", type=whole_number, default=10**6, metavar="K",
        help="classes of the part search (default: %(default)s)")  # fmt: skip
    add("--steps", type=whole_number, default=300, metavar="N",
        help="steps of a repetition in the part workers (default: %(default)s)")  # fmt: skip
    add("--workers", type=whole_number, default=2, metavar="N",
        help="workers of the part workers (default: %(default)s)")  # fmt: skip
    add("--rounds", type=whole_number, default=3, metavar="N",
        help="rounds of the part workers (default: %(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    return parser


def make_table(results: Sequence[Result], task: Task) -> Any:
    """Return the table that users see."""
    options = task.options
    title = (
        f"{options.task}, {task.classes:,} classes, {options.seconds:g} s of training each "
        f"({options.clock} clock), table {options.table}, width {options.width}, "
        f"B={options.buckets}, R={options.repetitions}, {options.precision}"
    )
    numbers = ["last layers, parameters", "MB in training", "steps", "top-1, %", "top-5, %"]
    numbers += ["queries/s, 1 and 64 in a call"] * options.serve
    table = new_table(title, ["contestant"], numbers, pad_edge=False)
    for each in results:
        table.add_row(
            each.name, f"{each.head:,}", f"{each.megabytes:,.1f}", f"{each.steps:,}",
            f"{each.top1:.1f}", f"{each.top5:.1f}",
            *([", ".join(f"{rate:,.0f}" for rate in each.served.values())] * options.serve),
        )  # fmt: skip
    return table
