"""``tfscale bench pipelines``: how long stages wait in each order, measured and simulated.

Stages are processes that sleep: so the benchmark measures orders, not the processors of this
machine. A forward pass of a microbatch takes a stage one unit of time, the gradient of its input
one, the gradient of its weights one. All else is real: processes, ``fit``, messages.

- ``idle``: each order for some steps.
- ``delays``: each unit of time is drawn at random, so that ranks meet in ever other ways.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfscale.parallel.pipeline import ORDERS
from tfscale.plan.pipelines import PipelineOrder, Times, simulate
from tfscale.tools.bench import machine, measure
from tfscale.tools.bench.command import (
    bench_parser,
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

IDLE, DELAYS = "idle", "delays"
FEATURES, SECONDS, WARM_UP = 4, 900.0, 2
FORWARD, INPUT, WEIGHT = "F", "I", "W"


class Slept(NamedTuple):
    """A sleep of a stage: for which work, and when."""

    work: str
    begin: float
    end: float


@dataclass(frozen=True)
class Seen:
    """Measurements of an order.

    Attributes:
        idle: the largest share of the time in which a rank waits; the median of all steps.
        live: for each rank the most microbatches whose activations it kept.
        steps: number of steps.
    """

    idle: float
    live: list[int]
    steps: int


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench pipelines``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    if arguments.worker:
        _work(arguments)
        return 0
    about, console = machine.describe(), make_console()
    try:
        with progress(console) as show:
            for part in arguments.parts:
                found = {}
                for number, name in enumerate(arguments.orders):
                    show(f"{part}: {name}", number / len(arguments.orders))
                    order = ORDERS[name](arguments.stages, arguments.microbatches)
                    found[name] = (order, _train(arguments, part, name, order))
                console.print(make_table(arguments, part, found))
    except (WorkerFailed, OSError) as error:
        print(f"tfscale bench: error: {error}", file=sys.stderr)
        return 1
    console.print(machine.signature(about, "pipelines", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench pipelines``."""
    parser = bench_parser("pipelines", "Measure how long the stages of a pipeline wait, by order.")
    add = parser.add_argument
    add("--parts", type=list_of(one_of((IDLE, DELAYS))), default=IDLE, metavar="NAME,...",
        help=f"what to measure: {IDLE}, {DELAYS} (default: %(default)s)")  # fmt: skip
    orders = tuple(ORDERS)
    add("--orders", type=list_of(one_of(orders)), default=",".join(orders), metavar="NAME,...",
        help="orders of turns (default: %(default)s)")  # fmt: skip
    for name, size, text in (
        ("stages", 4, "number of processes, each of which is a rank"),
        ("microbatches", 8, "number of microbatches of a batch"),
        ("steps", 10, "number of steps of each order"),
    ):
        add(f"--{name}", type=whole_number, default=size, metavar="N",
            help=f"{text} (default: %(default)s)")  # fmt: skip
    add("--ms", type=float, default=50.0, metavar="MS",
        help="what a unit of time is (default: %(default)s)")  # fmt: skip
    add("--worker", help=argparse.SUPPRESS)
    add("--folder", help=argparse.SUPPRESS)
    return parser


def make_table(
    arguments: argparse.Namespace, part: str, found: dict[str, tuple[PipelineOrder, Seen]]
) -> Table:
    """Return the table that users see."""
    about = f"{arguments.stages} ranks, {arguments.microbatches} microbatches"
    numbers = "steps", "idle", "simulated", "live microbatches", "of the order"
    table = new_table(f"{part}: {about}", ["order"], numbers)
    for name, (order, seen) in found.items():
        simulated = simulate(order, Times(1, 1, 1)).idle_share
        table.add_row(
            name, str(seen.steps), f"{seen.idle:.1%}" if part == IDLE else "",
            f"{simulated:.1%}" if part == IDLE else "",
            " ".join(map(str, seen.live)), " ".join(map(str, live_of(order))),
        )  # fmt: skip
    return table


def live_of(order: PipelineOrder) -> list[int]:
    """Return for each rank the most passes of stages whose activations its turns keep."""
    chunks = order.stages // order.ranks
    return [int(live * chunks) for live in order.verify().live]


def seen_in(slept: Sequence[Sequence[Slept]], order: PipelineOrder, steps: int) -> Seen:
    """Return what the sleeps of all ranks show.

    Args:
        slept: sleeps of each rank, of all steps.
        order: order of the turns.
        steps: number of steps.
    """
    shares = []
    for step in range(WARM_UP, steps):
        own = [_of_step(one, step, steps) for one in slept]
        begin = min(each.begin for rank in own for each in rank)
        seconds = max(each.end for rank in own for each in rank) - begin
        busy = [sum(each.end - each.begin for each in rank) for rank in own]
        shares.append(1 - min(busy) / seconds)
    return Seen(float(np.median(shares)), [_most_live(one) for one in slept], steps)


def _of_step(slept: Sequence[Slept], step: int, steps: int) -> Sequence[Slept]:
    each = len(slept) // steps
    return slept[step * each : (step + 1) * each]


def _most_live(slept: Sequence[Slept]) -> int:
    events = [(each.begin, 1) for each in slept if each.work == FORWARD]
    events += [(each.end, -1) for each in slept if each.work == WEIGHT]
    live = most = 0
    for _, change in sorted(events):
        live += change
        most = max(most, live)
    return most


def _train(arguments: argparse.Namespace, part: str, name: str, order: PipelineOrder) -> Seen:
    with tempfile.TemporaryDirectory(prefix="tfscale-pipelines-") as folder:
        words = {"worker": part, "orders": name, "folder": folder, "ms": arguments.ms}
        words |= {key: vars(arguments)[key] for key in ("stages", "microbatches", "steps")}
        options = [f"--{key}={value}" for key, value in words.items()]
        command = [sys.executable, "-m", "tfscale", "bench", "pipelines", *options]
        with LocalWorkers(command, arguments.stages, environment=QUIET) as group:
            group.wait(SECONDS)
        slept = [
            [Slept(*each) for each in np.load(Path(folder) / f"{rank}.npy").tolist()]
            for rank in range(arguments.stages)
        ]
    return seen_in(slept, order, arguments.steps)


def _work(arguments: argparse.Namespace) -> None:
    """Train as one of the stages, and write when it slept."""
    import keras
    import tensorflow as tf

    import tfscale

    me = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    slept: list[Slept] = []
    draw = random.Random(me)
    unit = arguments.ms / 1e3

    def sleeping(work: str, x: Any) -> Any:
        def sleep(numbers: Any) -> Any:
            begin = time.time()
            time.sleep(unit if arguments.worker == IDLE else draw.uniform(0, unit))
            slept.append(Slept(work, begin, time.time()))
            return numbers

        found = tf.numpy_function(sleep, [x], x.dtype, stateful=False)
        found.set_shape(x.shape)
        return found

    @tf.custom_gradient
    def slow(x: Any, weight: Any) -> Any:
        def backward(gradient: Any) -> Any:
            of_input = sleeping(INPUT, gradient)
            with tf.control_dependencies([of_input]):
                of_weight = sleeping(WEIGHT, tf.reduce_sum(gradient, 0))
            return of_input, of_weight

        return sleeping(FORWARD, x + weight), backward

    class Stage(keras.layers.Layer):
        def build(self, _: Any) -> None:
            self.before = self.add_weight(shape=(FEATURES,), name="before")
            self.offset = self.add_weight(shape=(FEATURES,), name="offset")

        def call(self, x: Any) -> Any:
            # With a weight before it, the first stage needs the gradient of its input, too.
            return slow(x + self.before, tf.convert_to_tensor(self.offset))

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    (name,) = arguments.orders
    order = ORDERS[name](arguments.stages, arguments.microbatches)
    names = [f"stage{i}" for i in range(order.stages)]
    strategy = tfscale.ScaleStrategy(
        "ring",
        grid=tfscale.Grid(stages=arguments.stages),
        pipeline=tfscale.Pipeline(names[1:], arguments.microbatches, name),
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input([FEATURES]), *(Stage(name=name) for name in names)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    rows = arguments.microbatches * 2
    x = np.ones((rows, FEATURES), np.float32)
    batches = tf.data.Dataset.from_tensors((x, x)).repeat()
    model.fit(batches, steps_per_epoch=arguments.steps, verbose=0)
    np.save(Path(arguments.folder) / f"{me}.npy", np.array(slept, "U1,f8,f8"))
    measure.leave(arguments.folder, "worker", me, arguments.stages)
