"""``tfscale bench first``: what the first step of ``fit`` costs on several replicas.

The first step traces Keras's ``train_step`` on each replica, and TensorFlow then optimizes and
places the graph. Each training runs in a process of its own, and the strategies take turns.
Processor time (user and system, of all threads) measures the cost even if other programs use the
machine. The number of operations in the graph is the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tfscale.tools.bench import machine
from tfscale.tools.bench.command import (
    answer_of_process,
    bench_parser,
    list_of,
    make_console,
    one_of,
    progress,
    whole_number,
)
from tfscale.tools.bench.table import new_table

if TYPE_CHECKING:
    from rich.table import Table

MODELS = ("resnet50", "transformer", "gan")  # of first_models.py
MIRRORED, SCALE = "MirroredStrategy", "ScaleStrategy"
STRATEGIES = (MIRRORED, SCALE)
ROWS = 2  # rows of each replica: few, so that the step itself costs little
STEPS = 2


@dataclass(frozen=True)
class FirstStep:
    """Cost of the first step of a training.

    Attributes:
        cpu: seconds of processor time.
        wall: seconds by the clock.
        later: seconds of processor time of the second step.
        operations: operations in the graph of the step and in the functions that it calls.
    """

    cpu: float
    wall: float
    later: float
    operations: int


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    if argv and argv[0] == "--training":
        model, strategy, devices = argv[1:]
        print(json.dumps(asdict(_train(model, strategy, int(devices)))))
        return 0
    arguments = make_parser().parse_args(argv)
    about = machine.describe()
    console = make_console()
    try:
        with progress(console) as show:
            found = {m: _measure(m, arguments, show) for m in arguments.models}
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"tfscale bench: error: {error}", file=sys.stderr)
        return 1
    console.print(make_table(arguments.devices, found))
    console.print("medians; CPU: user and system, of all threads; ratio: to MirroredStrategy's CPU")
    console.print(machine.signature(about, "first", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench first``."""
    parser = bench_parser("first", "Measure what the first step of fit costs on several replicas.")
    add = parser.add_argument
    add("--models", type=list_of(one_of(MODELS)), default=",".join(MODELS), metavar="NAME,...",
        help="models to train (default: %(default)s)")  # fmt: skip
    add("--devices", type=whole_number, default=2, metavar="N",
        help="logical CPUs of each process (default: %(default)s)")  # fmt: skip
    add("--rounds", type=whole_number, default=3, metavar="N",
        help="turns of each strategy (default: %(default)s)")  # fmt: skip
    return parser


def _measure(
    model: str, arguments: argparse.Namespace, show: Callable[[str, float], None]
) -> dict[str, list[FirstStep]]:
    found: dict[str, list[FirstStep]] = {name: [] for name in STRATEGIES}
    for number in range(arguments.rounds):
        for strategy in STRATEGIES:
            show(f"{model}: {strategy}", number / arguments.rounds)
            found[strategy].append(measure(model, strategy, arguments.devices))
    return found


def measure(model: str, strategy: str, devices: int) -> FirstStep:
    """Train in a new process, for at most half an hour; return the result."""
    words = "--training", model, strategy, str(devices)
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", **os.environ}
    return FirstStep(**answer_of_process("first", words, environment))


def make_table(devices: int, found: dict[str, dict[str, list[FirstStep]]]) -> Table:
    """Return the table that users see."""
    title = f"the first step of fit, 1 process with {devices} devices"
    numbers = "CPU s", "ratio", "wall s", "operations", "second step, CPU s"
    table = new_table(title, ["model", "strategy"], numbers)
    for model, each in found.items():
        stock = statistics.median(one.cpu for one in each[MIRRORED])
        for strategy, steps in each.items():
            cpu, wall, later = (
                statistics.median(getattr(one, name) for one in steps)
                for name in ("cpu", "wall", "later")
            )
            operations = f"{steps[0].operations:,}"
            table.add_row(
                model, strategy, f"{cpu:.1f}", f"{cpu / stock:.2f}", f"{wall:.1f}", operations,
                f"{later:.2f}",
            )  # fmt: skip
    return table


# ---------------------------------------------------------- process of a training


def _train(model: str, strategy: str, devices: int) -> FirstStep:
    import keras
    import numpy as np
    import tensorflow as tf

    from tfscale.tools.bench import first_models

    machine.split_cpu(devices)
    keras.utils.set_random_seed(0)
    chosen = _strategy(strategy, [f"CPU:{i}" for i in range(devices)])
    with chosen.scope():
        made, shapes = first_models.MODELS[model]()
    rows = ROWS * devices
    data = [np.ones([rows * STEPS, *shape], np.float32) for shape in shapes]
    batches = tf.data.Dataset.from_tensor_slices(tuple(data)).batch(rows)
    clock = _clock()
    before, begin = set(_functions()), clock.now()
    made.fit(batches, verbose=0, callbacks=[clock])
    first, second = clock.ends
    return FirstStep(
        cpu=first[0] - begin[0],
        wall=first[1] - begin[1],
        later=second[0] - first[0],
        operations=sum(count for name, count in _functions().items() if name not in before),
    )


def _strategy(name: str, devices: list[str]) -> Any:
    import tensorflow as tf

    from tfscale import ScaleStrategy

    if name == MIRRORED:
        return tf.distribute.MirroredStrategy(devices)
    return ScaleStrategy(devices=devices)


def _clock() -> Any:
    """Return a callback that records the ends of steps: in processor time, and by the clock."""
    import keras

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.ends: list[tuple[float, float]] = []

        def now(self) -> tuple[float, float]:
            return time.process_time(), time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(self.now())

    return Clock()


def _functions() -> dict[str, int]:
    """Return the number of operations of each function in TensorFlow's context."""
    from tfscale.bridge.tensorflow import context

    known = context()
    names = known.list_function_names()
    return {name: len(known.get_function_def(name).node_def) for name in names}
