"""``tfscale bench convergence``: how well models learn with each method of compression.

Replicas of one process learn small tasks, with several seeds for each wire and method. The seed
decides the first weights and the order of the data; the data are always the same. A model is
traced once for each method, and trains once for each seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfscale.collectives.cost import Link
from tfscale.collectives.wires import LOSSLESS, WIRES
from tfscale.tools.bench import digits, machine, trainings
from tfscale.tools.bench.command import bench_parser, list_of, one_of, whole_number
from tfscale.tools.bench.methods import checked, method_of
from tfscale.tools.bench.table import new_table
from tfscale.tools.bench.tasks import TASKS
from tfscale.tools.bench.trainings import compare, perplexity, spread

if TYPE_CHECKING:
    from rich.table import Table

ALGORITHM = "ring"  # the algorithm that rounds most often
BATCH = 64
STEPS_AT_ONCE = 8
LINK = Link(alpha=50e-6, beta=8 / 1e9)  # 1 Gbit/s, and the least latency of a message by TCP

OTHERS = (
    *("PowerSGD(1)", "PowerSGD(2)", "PowerSGD(4)"),
    *("TopK(0.1)", "TopK(0.01)"),
)
WITH_FEEDBACK = (
    LOSSLESS,
    *(f"Wire('{wire}', feedback=True)" for wire in WIRES if wire != LOSSLESS),
    *OTHERS,
)
WITHOUT = (
    *(f"Wire('{wire}', feedback=False)" for wire in WIRES if wire != LOSSLESS),
    *(f"{method[:-1]}, feedback=False)" for method in OTHERS),
)
METHODS = (*WITH_FEEDBACK, *WITHOUT)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Training to do.

    Args:
        task: a key of ``TASKS``.
        method: the method that sums gradients.
        replicas: number of replicas.
        seed: seed of the first weights and of the order of the data.
        rate: the learning rate.
        epochs: passes over the data.
    """

    task: str
    method: str
    replicas: int
    seed: int
    rate: float
    epochs: int

    def __str__(self) -> str:
        return f"{self.task}, {self.method}, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Run(Plan):
    """Result of a training.

    Args:
        accuracy: accuracy on the test data, in %.
        test_loss: loss on the test data.
        loss: loss on the training data.
        sent: bytes of gradients that a replica sends in a step.
        seconds: time of these bytes on ``LINK``, by the cost model of a ring.
    """

    accuracy: float
    test_loss: float
    loss: float
    sent: float
    seconds: float


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench convergence``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    words = (
        f"{arguments.replicas} replicas, {ALGORITHM}, batch {BATCH}; perplexity: e to the power of "
        "the test loss; ms: time of a step's messages on 1 Gbit/s, by the cost model, with a "
        f"latency of {1e6 * LINK.alpha:.0f} us"
    )

    def tables(runs: Sequence[Run]) -> Iterator[Table]:
        for task in dict.fromkeys(run.task for run in runs):
            yield make_table(task, [run for run in runs if run.task == task])

    return compare("convergence", argv, arguments, train_all, tables, words)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench convergence``."""
    parser = bench_parser(
        "convergence", "Measure how well models learn with each method of compression."
    )
    usual = [name for name in TASKS if name != "perceptron"]
    add = parser.add_argument
    add("--tasks", type=list_of(one_of(TASKS)), default=",".join(usual), metavar="NAME,...",
        help=f"some of {', '.join(TASKS)} (default: %(default)s)")  # fmt: skip
    add("--methods", type=checked, nargs="+", default=METHODS, metavar="METHOD",
        help="wires, or methods such as 'PowerSGD(4)' or \"Wire('int8', feedback=True)\"; all are "
        "compared with fp32, which is always measured (default: all wires, PowerSGD and TopK, "
        "with error feedback and without)")  # fmt: skip
    add("--replicas", type=whole_number, default=2, metavar="N",
        help="replicas on logical CPUs of this process (default: %(default)s)")  # fmt: skip
    add("--seeds", type=whole_number, default=5, metavar="N",
        help="trainings of each method (default: %(default)s)")  # fmt: skip
    add("--epochs", type=whole_number, metavar="N",
        help="passes over the data (default: the task's own number)")  # fmt: skip
    add("--rate", type=float, metavar="R",
        help="learning rate (default: the task's own rate)")  # fmt: skip
    add("--json", type=Path, metavar="FILE",
        help="add a line for each training to FILE; trainings that FILE has are not "
        "repeated")  # fmt: skip
    return parser


# ---------------------------------------------------------------------------
# Training.


def train_all(arguments: argparse.Namespace, show: Any) -> Iterator[Run]:
    """Train each task by each method, with each seed."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    known = trainings.read(arguments.json, Run)  # before TensorFlow starts: the file may be wrong
    machine.split_cpu(arguments.replicas)
    learner = functools.lru_cache(maxsize=1)(Learner)

    def train(plan: Plan) -> Run:
        return learner(plan.task, plan.method).run(plan)

    yield from trainings.each_once(list(_planned(arguments)), known, train, show)


def _planned(arguments: argparse.Namespace) -> Iterator[Plan]:
    methods = dict.fromkeys((LOSSLESS, *arguments.methods))
    for name, method, seed in itertools.product(arguments.tasks, methods, range(arguments.seeds)):
        rate = arguments.rate or TASKS[name].rate
        epochs = arguments.epochs or TASKS[name].epochs
        yield Plan(name, method, arguments.replicas, seed, rate, epochs)


class Learner:
    """Model of a task on all replicas, with one method."""

    def __init__(self, name: str, method: str) -> None:
        import keras

        from tfscale import ScaleStrategy

        keras.backend.clear_session()
        task = TASKS[name]
        self._strategy = ScaleStrategy(ALGORITHM, method=method_of(method))
        self._learner = trainings.Learner(
            task.model, task.optimizer, self._strategy, steps_at_once=STEPS_AT_ONCE
        )
        self._replicas = self._strategy.num_replicas_in_sync
        self._training, self._test = task.data()
        self._sent: tuple[float, float] | None = None

    def run(self, plan: Plan) -> Run:
        """Do one training and return its result."""
        batches = functools.partial(digits.batches, self._training, BATCH, plan.epochs)
        model = self._learner.fit(plan.seed, plan.rate, batches)
        accuracy, test_loss = digits.judge(model, *self._test)
        _, loss = digits.judge(model, *self._training)
        sent, seconds = self._sent = self._sent or self._traffic(plan.epochs)
        return Run(
            **dataclasses.asdict(plan),
            accuracy=accuracy,
            test_loss=test_loss,
            loss=loss,
            sent=sent,
            seconds=seconds,
        )

    def _traffic(self, epochs: int) -> tuple[float, float]:
        """Return bytes and seconds of a step, by what the first training has sent."""
        steps = epochs * math.ceil(len(self._training[0]) / BATCH)
        sent = messages = 0.0
        for row in self._strategy.explain():
            half = row.why.startswith("rows of")  # an all-gather of rows is half of an all-reduce
            rounds = (self._replicas - 1) * (1 if half else 2)
            messages += row.calls * len(row.collectives) * rounds / steps
            sent += row.calls * row.sent / steps
        return sent, LINK.alpha * messages + LINK.beta * sent


# ---------------------------------------------------------------------------
# Results.


def make_table(task: str, runs: Sequence[Run]) -> Table:
    """Return the table that users see."""
    numbers = "accuracy, %", "points from fp32", "perplexity", "training loss", "bytes", "ms"
    table = new_table(TASKS[task].words, ["method"], numbers, pad_edge=False)
    exact = [run.accuracy for run in runs if run.method == LOSSLESS]
    for method in dict.fromkeys(run.method for run in runs):
        same = [run for run in runs if run.method == method]
        points = [run.accuracy - other for run, other in zip(same, exact, strict=True)]
        table.add_row(
            str(method_of(method)),
            spread([run.accuracy for run in same], ".2f"),
            "" if method == LOSSLESS else spread(points, "+.2f"),
            spread([perplexity(run.test_loss) for run in same], ".3f"),
            spread([run.loss for run in same], ".4f"),
            f"{statistics.mean(run.sent for run in same):,.0f}",
            f"{1000 * statistics.mean(run.seconds for run in same):.2f}",
        )
    return table
