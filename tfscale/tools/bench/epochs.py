"""``tfscale bench epochs``: how long a ``fit`` of few tiny steps with validation takes.

Such a ``fit`` spends its time not on training, but on tracing, and on beginning and ending the
iterators of each epoch and validation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfscale.tools.bench import machine
from tfscale.tools.bench.command import bench_parser, make_console, progress, whole_number
from tfscale.tools.bench.table import new_table

if TYPE_CHECKING:
    from rich.table import Table

ROWS = 16  # rows of each replica's part of a batch
FEATURES = 8


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench epochs``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    about = machine.describe()
    machine.split_cpu(arguments.devices)
    fits = _fits(arguments)
    seconds: dict[str, list[float]] = {name: [] for name in fits}
    console = make_console()
    with progress(console) as show:
        for number in range(arguments.rounds):
            for name, fit in fits.items():
                show(name, number / arguments.rounds)
                seconds[name].append(fit())
    steps = arguments.epochs * arguments.steps
    title = f"fit of {steps} tiny steps in {arguments.epochs} epochs, each with validation"
    console.print(make_table(title, seconds))
    console.print("seconds; each fit has a new model, so the time includes tracing")
    console.print(machine.signature(about, "epochs", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench epochs``."""
    parser = bench_parser(
        "epochs", "Measure how long a fit of few tiny steps with validation takes."
    )
    add = parser.add_argument
    add("--devices", type=whole_number, default=4, metavar="N",
        help="logical CPUs of this process (default: %(default)s)")  # fmt: skip
    add("--rounds", type=whole_number, default=10, metavar="N",
        help="fits with each strategy (default: %(default)s)")  # fmt: skip
    add("--epochs", type=whole_number, default=3, metavar="N",
        help="epochs of each fit (default: %(default)s)")  # fmt: skip
    add("--steps", type=whole_number, default=4, metavar="N",
        help="steps of each epoch (default: %(default)s)")  # fmt: skip
    return parser


def _fits(arguments: argparse.Namespace) -> dict[str, Callable[[], float]]:
    import tensorflow as tf

    from tfscale import ScaleStrategy

    devices = [f"CPU:{i}" for i in range(arguments.devices)]
    strategies = {
        "one device": tf.distribute.get_strategy(),
        "MirroredStrategy": tf.distribute.MirroredStrategy(devices),
        "ScaleStrategy": ScaleStrategy("ring", devices=devices),
    }
    return {
        name: lambda strategy=strategy: _fit(strategy, arguments)  # type: ignore[misc]
        for name, strategy in strategies.items()
    }


def _fit(strategy: Any, arguments: argparse.Namespace) -> float:
    import keras
    import numpy as np

    batch = ROWS * arguments.devices
    x = np.ones([arguments.steps * batch, FEATURES], np.float32)
    y = x[:, :1]
    begin = time.perf_counter()
    with strategy.scope():
        model = keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    how = {"batch_size": batch, "epochs": arguments.epochs, "verbose": 0}
    model.fit(x, y, validation_data=(x, y), **how)
    return time.perf_counter() - begin


def make_table(title: str, seconds: dict[str, list[float]]) -> Table:
    """Return the table that users see."""
    table = new_table(title, ["strategy"], ["min", "median", "max", "median, of Mirrored"])
    stock = statistics.median(seconds["MirroredStrategy"])
    for name, each in seconds.items():
        median = statistics.median(each)
        cells = [min(each), median, max(each), median / stock]
        table.add_row(name, *(f"{cell:.2f}" for cell in cells))
    return table
