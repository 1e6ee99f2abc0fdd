"""``tfscale bench shares``: training with workers of which one is slow, by shares of the batch.

Each row of a batch costs a worker a sleep of so many milliseconds, and the first worker a multiple.
So the benchmark measures shares, not the processors of this machine: workers that share two cores
would be slow by chance. All else is real: processes, ``fit``, gradients that are summed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfscale.support.records import read_text
from tfscale.tools.bench import machine, measure
from tfscale.tools.bench.command import list_of, make_console, progress, whole_number
from tfscale.tools.bench.run import QUIET
from tfscale.tools.launch import LocalWorkers, WorkerFailed

if TYPE_CHECKING:
    from rich.table import Table

EQUAL, FIXED, MEASURED = "equal", "fixed", "auto"
ROWS, FEATURES = 32, 16  # rows of a batch for each worker
SECONDS = 900.0


@dataclass(frozen=True)
class Training:
    """Result of a training.

    Attributes:
        rate: samples per second of the last third of the steps.
        shares: part of the rows that each worker takes at the end; none if all take equally many.
        weights: all weights at the end, one after the other.
    """

    rate: float
    shares: Sequence[float] | None
    weights: Sequence[float]


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench shares``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    if arguments.worker:
        _work(arguments)
        return 0
    about, console = machine.describe(), make_console()
    try:
        with progress(console) as show:
            for number, workers in enumerate(arguments.workers):
                show(f"{workers} workers", number / len(arguments.workers))
                found = {
                    kind: _train(arguments, workers, kind) for kind in (EQUAL, FIXED, MEASURED)
                }
                alone = _train(arguments, 1, EQUAL, rows=ROWS * workers)
                console.print(make_table(arguments, workers, found, alone))
    except (WorkerFailed, OSError) as error:
        print(f"tfscale bench: error: {error}", file=sys.stderr)
        return 1
    console.print(
        "samples/s: in the last third of the steps; ideal: of workers that never wait; difference: "
        "largest of a weight, to one device that trains on whole batches"
    )
    console.print(machine.signature(about, "shares", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench shares``."""
    parser = argparse.ArgumentParser(
        prog="tfscale bench shares",
        description="Measure training with a slow worker, by shares of the batch.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workers", type=list_of(whole_number), default="2,4", metavar="N,...",
        help="numbers of workers (default: %(default)s)")  # fmt: skip
    add("--steps", type=whole_number, default=90, metavar="N",
        help="steps of each training (default: %(default)s)")  # fmt: skip
    add("--ms", type=float, default=4.0, metavar="MS",
        help="what a row costs a worker (default: %(default)s)")  # fmt: skip
    add("--slow", type=float, default=2.0, metavar="FACTOR",
        help="how many times longer the first worker takes (default: %(default)s)")  # fmt: skip
    add("--worker", help=argparse.SUPPRESS)
    add("--rows", type=int, default=ROWS, help=argparse.SUPPRESS)
    add("--folder", help=argparse.SUPPRESS)
    return parser


def ideal(arguments: argparse.Namespace, workers: int) -> float:
    """Return the samples per second of workers that never wait."""
    return float(1e3 / arguments.ms * (workers - 1 + 1 / arguments.slow))


def make_table(
    arguments: argparse.Namespace, workers: int, found: dict[str, Training], alone: Training
) -> Table:
    """Return the table that users see."""
    from rich import box
    from rich.table import Table

    title = f"{workers} workers, the first one {arguments.slow:g} times slower"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("shares")
    for column in ("samples/s", "of the ideal", "first worker's rows", "difference"):
        table.add_column(column, justify="right")
    for kind, one in found.items():
        first = 1 / workers if one.shares is None else one.shares[0]
        apart = np.abs(np.subtract(one.weights, alone.weights)).max()
        table.add_row(
            kind, f"{one.rate:.1f}", f"{one.rate / ideal(arguments, workers):.1%}",
            f"{first:.1%}", f"{apart:.1e}",
        )  # fmt: skip
    return table


def _train(
    arguments: argparse.Namespace, workers: int, kind: str, rows: int | None = None
) -> Training:
    with tempfile.TemporaryDirectory(prefix="tfscale-shares-") as folder:
        words = {
            "steps": arguments.steps,
            "ms": arguments.ms if workers > 1 else 0,
            "slow": arguments.slow,
            "rows": rows or ROWS * workers,
            "folder": folder,
        }
        options = [f"--{name}={value}" for name, value in words.items()]
        command = [sys.executable, "-m", "tfscale", "bench", "shares", f"--worker={kind}", *options]
        with LocalWorkers(command, workers, environment=QUIET) as group:
            group.wait(SECONDS)
        return Training(**json.loads(read_text(Path(folder) / "result.json")))


def _work(arguments: argparse.Namespace) -> None:
    """Train as one of the workers; the first one writes the result."""
    import keras
    import tensorflow as tf

    import tfscale

    cluster = json.loads(os.environ.get("TF_CONFIG", "{}"))
    workers = len(cluster.get("cluster", {}).get("worker", [""]))
    me = int(cluster.get("task", {}).get("index", 0))
    seconds = arguments.ms / 1e3 * (arguments.slow if me == 0 else 1)
    shares = {EQUAL: None, FIXED: {"worker:0": 1 / arguments.slow}, MEASURED: "auto"}
    strategy = tfscale.ScaleStrategy(
        "ring", shares=shares[arguments.worker] if workers > 1 else None
    )

    class Costs(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            def sleep(rows: Any) -> Any:
                time.sleep(seconds * float(rows))
                return np.float32(0)

            slept = tf.numpy_function(sleep, [tf.shape(inputs)[0]], tf.float32)
            slept.set_shape([])
            return inputs + tf.stop_gradient(slept)

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([FEATURES]),
                Costs(),
                keras.layers.Dense(64, "relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    x = np.random.default_rng(0).standard_normal((4 * arguments.rows, FEATURES)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
    begins: list[float] = []
    noted = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: begins.append(time.perf_counter())
    )
    steps = arguments.steps
    batches = data.batch(arguments.rows).repeat()
    model.fit(batches, steps_per_epoch=steps, verbose=0, callbacks=[noted])
    last = steps // 3
    rate = last * arguments.rows / (begins[-1] - begins[-1 - last])
    weights = np.concatenate([np.ravel(w) for w in model.get_weights()])
    if me == 0:
        found = {"rate": rate, "shares": strategy.shares_of_batch(), "weights": weights.tolist()}
        (Path(arguments.folder) / "result.json").write_text(json.dumps(found))
    measure.leave(arguments.folder, "worker", me, workers)
