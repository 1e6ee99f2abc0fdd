"""``tfscale bench devices``: all-reduces between logical devices of one process.

Nothing travels over a network here. The benchmark shows the time of the engine and of TensorFlow's
runtime. It also shows that many all-reduces at once run in turn and do not block each other.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfscale.collectives import ALGORITHMS
from tfscale.tools.bench import machine
from tfscale.tools.bench.command import bench_parser, list_of, make_console, one_of, whole_number
from tfscale.tools.bench.measure import in_turn

if TYPE_CHECKING:
    from tfscale.native import Communicator, Group

ROUNDS = 200


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench devices``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    about = machine.describe()
    console = make_console()
    console.print(f"{arguments.numbers:,} float32 numbers, {arguments.devices} logical devices")
    group = _make_group(arguments.devices)
    for count in arguments.at_once:
        functions = {"nothing": _function(group, None, count)}
        functions |= {name: _function(group, name, count) for name in arguments.algorithms}
        for name, times in _measure(functions, group.ranks, arguments.numbers).items():
            median, largest = statistics.median(times) * 1e3, max(times) * 1e3
            console.print(
                f"{name:>12}, {count:3} at once: median {median:7.3f} ms, "
                f"largest {largest:8.3f} ms, each {median / count:6.3f} ms"
            )
    console.print(machine.signature(about, "devices", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench devices``."""
    parser = bench_parser("devices", "Measure all-reduces between logical devices of one process.")
    add = parser.add_argument
    add("--devices", type=whole_number, default=8, metavar="P",
        help="logical CPUs of this process (default: %(default)s)")  # fmt: skip
    add("--numbers", type=whole_number, default=1000, metavar="N",
        help="float32 numbers of each all-reduce (default: %(default)s)")  # fmt: skip
    add("--at-once", type=list_of(whole_number), default="1,64", metavar="K,...",
        help="how many all-reduces run at the same time (default: %(default)s)")  # fmt: skip
    add("--algorithms", type=list_of(one_of(ALGORITHMS)), default="ring,tree,halving,direct",
        metavar="NAME,...", help="algorithms to compare (default: %(default)s)")  # fmt: skip
    return parser


def _make_group(devices: int) -> Group:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    from tfscale.native import Group

    machine.split_cpu(devices)
    return Group.local()


def _function(group: Group, algorithm: str | None, count: int) -> Callable[..., Any]:
    """Return a function that makes ``count`` all-reduces at once.

    With ``algorithm=None`` it reduces nothing, which shows the time of the call itself.
    """
    from tfscale.native import all_reduce

    @group.function
    def reduce(communicator: Communicator, x: Any) -> list[Any]:
        values = [x + float(k) for k in range(count)]
        if algorithm is None:
            return values
        return [all_reduce(value, communicator, schedule=algorithm) for value in values]

    return reduce


def _measure(
    functions: dict[str, Callable[..., Any]], ranks: int, numbers: int
) -> dict[str, list[float]]:
    """Return the seconds of each call; the functions take turns."""
    import tensorflow as tf

    values = [tf.random.normal([numbers]) for _ in range(ranks)]
    calls = {name: functools.partial(function, values) for name, function in functions.items()}
    return in_turn(calls, ROUNDS, warm_up=1)
