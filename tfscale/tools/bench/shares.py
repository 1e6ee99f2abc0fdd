"""``tfscale bench shares``: training with workers of which one is slow, by shares of the batch.

With ``--hold sleep`` each row of a batch costs a worker a sleep of so many milliseconds, and the
slow worker a multiple. So the benchmark measures shares, not the processors of this machine:
workers that share two cores would be slow by chance. With ``--hold quota`` workers compute, and
each gets a part of a core, as far as there are cores for all. All else is real in both: processes,
``fit``, gradients that are summed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfscale.support.records import read_text
from tfscale.tools.bench import holding, machine, measure
from tfscale.tools.bench.command import (
    bench_parser,
    ended_by_signals,
    list_of,
    make_console,
    one_of,
    progress,
    whole_number,
)
from tfscale.tools.bench.run import QUIET
from tfscale.tools.bench.table import new_table
from tfscale.tools.launch import LocalWorkers, WorkerFailed

if TYPE_CHECKING:
    from rich.table import Table

EQUAL, FIXED, MEASURED = "equal", "fixed", "auto"
BOUND, BOTH, SKIPS = "bound", "auto-bound", "skips"
ALONE = "alone"  # a worker that waits for nobody
FIRST, TURNS = "first", "turns"
SLEEP = "sleep"
FEATURES = 16
POSITIONS, WIDTH = 256, 256  # what a worker computes for a row, unless it sleeps
STRETCH = 4  # steps in which the same worker is slow, if workers are slow in turn
STALENESS = 8
BUSY = 0.8  # part of the machine's cores that workers may use, so that nobody waits for a core
SECONDS = 900.0


@dataclass(frozen=True)
class Training:
    """Result of one worker's training.

    Attributes:
        rate: samples per second of all workers together, in the last third of the steps.
        shares: part of the rows that each worker takes at the end; none if all take equally many.
        weights: all weights at the end, one after the other.
        left_out: part of its batches that this worker has left out in the last third of the steps.
    """

    rate: float
    shares: Sequence[float] | None
    weights: np.ndarray
    left_out: float

    def write(self, folder: str, worker: int) -> None:
        """Write the result for ``read``."""
        file = Path(folder) / f"result-{worker}"
        np.save(file.with_suffix(".npy"), self.weights)
        others = {name: value for name, value in vars(self).items() if name != "weights"}
        file.with_suffix(".json").write_text(json.dumps(others))

    @classmethod
    def read(cls, folder: str, worker: int) -> Training:
        """Return the result of a worker."""
        file = Path(folder) / f"result-{worker}"
        weights = np.load(file.with_suffix(".npy"))
        return cls(weights=weights, **json.loads(read_text(file.with_suffix(".json"))))


@dataclass(frozen=True)
class Found:
    """Results of a training.

    Attributes:
        rate: samples per second that the workers have trained on.
        first: part of the rows that the first worker takes.
        weights: all weights at the end; none if they need not be those of one device.
    """

    rate: float
    first: float
    weights: np.ndarray | None


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench shares``; return the exit status."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.worker:
        _work(arguments)
        return 0
    if arguments.who == TURNS and arguments.hold != SLEEP:
        parser.error(f"--who {TURNS} needs --hold {SLEEP}; got --hold {arguments.hold}")
    about, console = machine.describe(), make_console()
    try:
        with ended_by_signals(), progress(console) as show:
            for number, workers in enumerate(arguments.workers):
                show(f"{workers} workers", number / len(arguments.workers))
                best = ideal(arguments, workers)
                found = {kind: _train(arguments, workers, kind) for kind in arguments.kinds}
                (alone,) = _run(arguments, 1, EQUAL, arguments.each * workers, held=False)
                console.print(make_table(arguments, workers, found, alone, best))
    except (WorkerFailed, holding.HoldError, OSError) as error:
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
    parser = bench_parser("shares", "Measure training with a slow worker, by shares of the batch.")
    add = parser.add_argument
    kinds = (EQUAL, FIXED, MEASURED, BOUND, BOTH, SKIPS)
    add("--workers", type=list_of(whole_number), default="2,4", metavar="N,...",
        help="numbers of workers (default: %(default)s)")  # fmt: skip
    add("--kinds", type=list_of(one_of(kinds)), default=",".join(kinds[:3]), metavar="KIND,...",
        help=f"some of {', '.join(kinds)}; the last three are BoundedStaleness({STALENESS}), "
        "without more, with shares='auto', and with skips=True (default: %(default)s)")  # fmt: skip
    add("--hold", choices=(SLEEP, holding.QUOTA, holding.STOP), default=SLEEP,
        help="what makes a worker slow: each row costs a sleep; a quota of a core (a cgroup, needs "
        "root); or signals that stop it for a part of the time (default: %(default)s)")  # fmt: skip
    add("--cores", type=float, default=BUSY * len(os.sched_getaffinity(0)), metavar="N",
        help="cores that all workers use together, unless they sleep; none gets more than one "
        "(default: %(default)s)")  # fmt: skip
    add("--steps", type=whole_number, default=90, metavar="N",
        help="steps of each training (default: %(default)s)")  # fmt: skip
    add("--each", type=whole_number, default=32, metavar="N",
        help="rows of the global batch for each worker (default: %(default)s)")  # fmt: skip
    add("--ms", type=float, default=4.0, metavar="MS",
        help=f"what a row costs a worker with --hold {SLEEP} (default: %(default)s)")  # fmt: skip
    add("--slow", type=float, default=2.0, metavar="FACTOR",
        help="how many times longer a slow worker takes (default: %(default)s)")  # fmt: skip
    add("--who", choices=(FIRST, TURNS), default=FIRST,
        help=f"who is slow: the first worker always, or another one in turn for {STRETCH} steps, "
        "at random (default: %(default)s)")  # fmt: skip
    add("--worker", help=argparse.SUPPRESS)
    add("--rows", type=int, help=argparse.SUPPRESS)
    add("--folder", help=argparse.SUPPRESS)
    add("--held", type=lambda text: text.split(","), default=[], help=argparse.SUPPRESS)
    return parser


def ideal(arguments: argparse.Namespace, workers: int) -> float:
    """Return the samples per second of workers that never wait.

    Workers that compute are measured: each trains alone, at the same time as the others.
    """
    if arguments.hold == SLEEP:
        return float(1e3 / arguments.ms * (workers - 1 + 1 / arguments.slow))
    return sum(one.rate for one in _run(arguments, workers, ALONE, arguments.each))


def cores_of(arguments: argparse.Namespace, workers: int) -> list[float]:
    """Return how much of a core each worker gets."""
    parts = [1 / arguments.slow] + [1.0] * (workers - 1)
    return [part * min(1.0, arguments.cores / sum(parts)) for part in parts]


def make_table(
    arguments: argparse.Namespace,
    workers: int,
    found: dict[str, Found],
    alone: Training,
    best: float,
) -> Table:
    """Return the table that users see."""
    who = "the first one" if arguments.who == FIRST else "one of them in turn"
    title = f"{workers} workers, {who} {arguments.slow:g} times slower"
    if arguments.hold != SLEEP:
        cores = ", ".join(f"{core:.2f}" for core in cores_of(arguments, workers))
        title += f", cores: {cores}"
    numbers = "samples/s", "of the ideal", "first worker's rows", "difference"
    table = new_table(title, ["shares"], numbers)
    for kind, one in found.items():
        apart = "-"
        if one.weights is not None:
            apart = f"{np.abs(np.subtract(one.weights, alone.weights)).max():.1e}"
        table.add_row(kind, f"{one.rate:.1f}", f"{one.rate / best:.1%}", f"{one.first:.1%}", apart)
    return table


def _train(arguments: argparse.Namespace, workers: int, kind: str) -> Found:
    each = _run(arguments, workers, kind, arguments.each * workers)
    left_out = sum(one.left_out for one in each) / workers
    first = 1 / workers if each[0].shares is None else each[0].shares[0]
    weights = None if kind in (BOUND, BOTH, SKIPS) else each[0].weights
    return Found(each[0].rate * (1 - left_out), first, weights)


def _run(
    arguments: argparse.Namespace, workers: int, kind: str, rows: int, held: bool = True
) -> list[Training]:
    """Return what each worker has found in a training, or all in trainings of their own."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tfscale-shares-"))
        words = {"rows": rows, "folder": folder}
        words |= {name: getattr(arguments, name) for name in ("steps", "slow", "hold", "who", "ms")}
        if held and arguments.hold != SLEEP:
            cores = cores_of(arguments, workers)
            texts = stack.enter_context(holding.holds(arguments.hold, cores))
            words["held"] = ",".join(texts)
        if not held:
            words["ms"] = 0
        options = [f"--{name}={value}" for name, value in words.items()]
        command = [sys.executable, "-m", "tfscale", "bench", "shares", f"--worker={kind}", *options]
        with LocalWorkers(command, workers, environment=QUIET) as group:
            group.wait(SECONDS)
        return [Training.read(folder, me) for me in range(workers)]


def _work(arguments: argparse.Namespace) -> None:
    """Train as one of the workers, and write the result."""
    import keras
    import tensorflow as tf

    import tfscale

    cluster = json.loads(os.environ.get("TF_CONFIG", "{}"))
    workers = len(cluster.get("cluster", {}).get("worker", [""]))
    me = int(cluster.get("task", {}).get("index", 0))
    steps, last = arguments.steps, arguments.steps // 3
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = _strategy(arguments, workers)
    ours = isinstance(strategy, tfscale.ScaleStrategy)
    moments: list[float] = []
    skipped: list[int] = []

    def begins(batch: int, logs: Any) -> None:
        moments.append(time.perf_counter())
        if batch == 1 and arguments.held:  # the first step was traced
            holding.begin(arguments.held[me])
        if batch in (steps - 1 - last, steps - 1) and arguments.worker == SKIPS:
            skipped.append(strategy.figures_of_rounds()["skipped"])

    keras.utils.set_random_seed(1)
    if arguments.hold != SLEEP:  # sums over many rows lose digits on one device, too
        keras.config.set_dtype_policy("float64")
        keras.config.set_floatx("float64")
    with strategy.scope():
        cost = _works() if arguments.hold != SLEEP else [sleeps(_seconds(arguments, me, workers))]
        model = keras.Sequential(
            [
                keras.Input([FEATURES]),
                *cost,
                keras.layers.Dense(64, "relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.001), "mse")
    x = (
        np.random.default_rng(0)
        .standard_normal((4 * arguments.rows, FEATURES))
        .astype(keras.config.floatx())
    )
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
    noted = keras.callbacks.LambdaCallback(on_train_batch_begin=begins)
    batches = data.batch(arguments.rows).repeat()
    model.fit(batches, steps_per_epoch=steps, verbose=0, callbacks=[noted])
    found = Training(
        rate=last * arguments.rows / (moments[-1] - moments[-1 - last]),
        shares=strategy.shares_of_batch() if ours else None,
        weights=np.concatenate([np.ravel(w) for w in model.get_weights()]),
        left_out=(skipped[-1] - skipped[0]) / last if skipped else 0.0,
    )
    found.write(arguments.folder, me)
    measure.leave(arguments.folder, "worker", me, workers)


def _strategy(arguments: argparse.Namespace, workers: int) -> Any:
    import tensorflow as tf

    import tfscale

    if arguments.worker == ALONE or workers == 1:
        return tf.distribute.get_strategy()
    settings: dict[str, dict[str, Any]] = {
        EQUAL: {},
        FIXED: {"shares": {"worker:0": 1 / arguments.slow}},
        MEASURED: {"shares": "auto"},
        BOUND: {"sync": tfscale.sync.BoundedStaleness(STALENESS)},
        BOTH: {"sync": tfscale.sync.BoundedStaleness(STALENESS), "shares": "auto"},
        SKIPS: {"sync": tfscale.sync.BoundedStaleness(STALENESS, skips=True)},
    }
    return tfscale.ScaleStrategy("ring", **settings[arguments.worker])


def _seconds(arguments: argparse.Namespace, me: int, workers: int) -> Iterator[float]:
    """Yield what a row costs a worker in each step, in seconds."""
    step = 0
    while True:
        dice = random.Random(step // STRETCH)
        slow = 0 if arguments.who == FIRST else dice.randrange(workers)
        yield arguments.ms / 1e3 * (arguments.slow if me == slow else 1)
        step += 1


def sleeps(seconds: Iterator[float]) -> Any:
    """Return a layer that sleeps the next number of seconds for each row of its inputs."""
    import keras
    import tensorflow as tf

    def sleep(rows: Any) -> Any:
        time.sleep(next(seconds) * float(rows))
        return np.float32(0)

    class Costs(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            slept = tf.numpy_function(sleep, [tf.shape(inputs)[0]], tf.float32)
            slept.set_shape([])
            return inputs + tf.stop_gradient(slept)

    return Costs()


def _works() -> list[Any]:
    """Return layers with much to compute for each row, and few weights."""
    from keras import layers

    return [
        layers.RepeatVector(POSITIONS),
        layers.Dense(WIDTH, "relu"),
        layers.Dense(WIDTH, "relu"),
        layers.GlobalAveragePooling1D(),
    ]
