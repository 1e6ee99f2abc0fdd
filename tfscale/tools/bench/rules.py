"""``tfscale bench rules``: how well models learn if replicas synchronize once in many steps.

Replicas of one process learn small tasks by each sync rule, with the same samples in the same
order. The data are shared in one of two ways: each replica has a random share of all data, or each
replica has data of a different kind, as if data could not leave the place where they arise.
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

import numpy as np

from tfscale.tools.bench import digits, machine, trainings
from tfscale.tools.bench.command import bench_parser, list_of, one_of, whole_number
from tfscale.tools.bench.methods import checked_rule, rule_of
from tfscale.tools.bench.table import new_table
from tfscale.tools.bench.tasks import TASKS
from tfscale.tools.bench.trainings import compare, perplexity, spread

if TYPE_CHECKING:
    from rich.table import Table

    from tfscale.sync import Rule

SHARES = ("mixed", "sorted")
RULES = (
    "EveryStep()",
    *(f"LocalSGD({every})" for every in (4, 16, 64)),
    *(f"DiLoCo({every})" for every in (10, 50, 200)),
    "DiLoCo(50, wire='int8')",
    "DiLoCo(50, fragments=2, delay=5)",
    "ElasticAveraging(10, alpha=0.1)",
    "BoundedStaleness(2)",
    "BoundedStaleness(8)",
    "Gossip()",
    "Gossip(16, 'ring')",
    "Hierarchical(outer=DiLoCo(50), group=2)",
)
STEPS_AT_ONCE = 8  # steps per call of Keras, since a call takes longer than these steps
LINKS = {"100 Mbit/s": 8 / 100e6, "10 Gbit/s": 8 / 10e9}  # seconds per byte


@dataclasses.dataclass(frozen=True)
class Plan:
    """Training to do.

    Args:
        task: a key of ``TASKS``.
        rule: sync rule as a Python expression.
        replicas: number of replicas.
        shares: distribution of the data over replicas, ``"mixed"`` or ``"sorted"``.
        seed: seed of the first weights and of the order of the data.
        rate: learning rate.
        batch: samples of a step, of all replicas together.
        steps: number of steps of each replica.
    """

    task: str
    rule: str
    replicas: int
    shares: str
    seed: int
    rate: float
    batch: int
    steps: int

    def __str__(self) -> str:
        return (
            f"{self.replicas} replicas, seed {self.seed}, {self.task}, {self.shares}, {self.rule}, "
            f"rate {self.rate:g}"
        )


@dataclasses.dataclass(frozen=True)
class Run(Plan):
    """Result of a training.

    Args:
        accuracy: accuracy on the test data, in %.
        test_loss: loss on the test data.
        loss: loss on the training data.
        sent: bytes that the first replica sent per step, including the end of ``fit``.
    """

    accuracy: float
    test_loss: float
    loss: float
    sent: float


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench rules``; return the exit status."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        check(arguments)
    except ValueError as error:
        parser.error(str(error))
    words = (
        f"{arguments.steps} steps of {arguments.batch} samples, of all replicas together; "
        "rate: the tried rate with the least training loss; perplexity: e to the power of the test "
        "loss; ms: average time of a step's bytes on such a link"
    )

    def tables(runs: Sequence[Run]) -> Iterator[Table]:
        for task, replicas, shares in itertools.product(
            arguments.tasks, arguments.replicas, arguments.shares
        ):
            kind = (task, replicas, shares)
            same = [run for run in runs if (run.task, run.replicas, run.shares) == kind]
            if same:
                title = f"{TASKS[task].words}; {replicas} replicas, {shares} data"
                yield make_table(same, title)

    return compare("rules", argv, arguments, train_all, tables, words)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench rules``."""
    parser = bench_parser(
        "rules", "Measure how well models learn if replicas synchronize once in many steps."
    )
    add = parser.add_argument
    add("--rules", type=checked_rule, nargs="+", default=RULES, metavar="RULE",
        help="sync rules, such as \"DiLoCo(50, wire='int8')\"; all are compared with the first; "
        "rules whose groups have all replicas are left out (default: %(default)s)")  # fmt: skip
    add("--tasks", type=list_of(one_of(TASKS)), default="digits,language", metavar="NAME,...",
        help=f"some of {', '.join(TASKS)} (default: %(default)s)")  # fmt: skip
    add("--replicas", type=list_of(whole_number), default="4,2,8", metavar="N,...",
        help="numbers of replicas, in this order (default: %(default)s)")  # fmt: skip
    add("--shares", type=list_of(one_of(SHARES)), default=",".join(SHARES), metavar="NAME,...",
        help="mixed: each replica has a random part of the data, always the same; sorted: each has "
        "mostly some classes or, in the task language, sentences that begin with some words "
        "(default: %(default)s)")  # fmt: skip
    add("--seeds", type=whole_number, default=3, metavar="N",
        help="trainings of each kind (default: %(default)s)")  # fmt: skip
    add("--steps", type=whole_number, default=600, metavar="N",
        help="steps of each training (default: %(default)s)")  # fmt: skip
    add("--batch", type=whole_number, default=32, metavar="N",
        help="samples of a step, of all replicas together (default: %(default)s)")  # fmt: skip
    add("--rates", type=list_of(_factor), default="1", metavar="X,...",
        help="factors of the task's learning rate; each is tried, and tables show for each rule "
        "the rate with the least training loss (default: %(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE",
        help="add a line for each training to FILE; trainings that FILE has are not "
        "repeated")  # fmt: skip
    return parser


def _factor(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 (0.3, 1, 3)")
    return number


def check(arguments: argparse.Namespace) -> None:
    """Raise ``ValueError`` for options that would fail after hours of training."""
    for replicas in arguments.replicas:
        if replicas < 2:
            raise ValueError(
                "--replicas 1: a single replica has nobody to synchronize with; give 2 or more"
            )
        if arguments.batch % replicas:
            raise ValueError(
                f"--batch {arguments.batch}: {replicas} replicas cannot have equal parts of a "
                "batch "
                f"of {arguments.batch} samples; give a multiple of {replicas}"
            )
        for rule in map(rule_of, arguments.rules):
            group = _group(rule, replicas)
            if replicas % group:
                raise ValueError(
                    f"{rule}: {replicas} replicas cannot be divided into groups of {group}"
                )
            rule.round_rule.check(replicas // group)


def _group(rule: Rule, replicas: int) -> int:
    """Return how many replicas make each step together."""
    return min(replicas, getattr(rule, "group", 1) or replicas)


# ---------------------------------------------------------------------------
# Training.


def train_all(arguments: argparse.Namespace, show: Any) -> Iterator[Run]:
    """Train with each rule: with one seed after the other."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    known = trainings.read(arguments.json, Run)  # before TensorFlow starts: the file may be wrong
    machine.split_cpu(max(arguments.replicas))
    traced_once = len(arguments.tasks) * len(arguments.rules)  # tracing takes as long as training
    learner = functools.lru_cache(maxsize=traced_once)(Learner)

    def train(plan: Plan) -> Run:
        return learner(plan.task, plan.rule, plan.replicas).run(plan)

    yield from trainings.each_once(list(planned(arguments)), known, train, show)


def planned(arguments: argparse.Namespace) -> Iterator[Plan]:
    """Yield the trainings in an order that fills whole tables, also if a user interrupts it."""
    for replicas, seed, task, rule in itertools.product(
        arguments.replicas, range(arguments.seeds), arguments.tasks, arguments.rules
    ):
        if _group(rule_of(rule), replicas) == replicas:
            continue
        for shares, factor in itertools.product(arguments.shares, arguments.rates):
            rate = factor * TASKS[task].rate
            yield Plan(task, rule, replicas, shares, seed, rate, arguments.batch, arguments.steps)


class Learner:
    """Model of a task on all replicas, with one sync rule."""

    def __init__(self, name: str, rule: str, replicas: int) -> None:
        from tfscale import ScaleStrategy

        task = TASKS[name]
        self._kinds = task.kinds
        self._training, self._test = task.data()
        devices = [f"CPU:{number}" for number in range(replicas)]
        self._strategy = ScaleStrategy("ring", devices=devices, sync=rule_of(rule))
        self._learner = trainings.Learner(
            task.model, task.optimizer, self._strategy, steps_at_once=STEPS_AT_ONCE
        )

    def run(self, plan: Plan) -> Run:
        """Do one training and return its result."""
        order = orders(
            self._kinds(*self._training), plan.replicas, plan.shares,
            plan.batch // plan.replicas, plan.steps, plan.seed,
        )  # fmt: skip
        before = self._sent()
        model = self._learner.fit(plan.seed, plan.rate, lambda: _batches(self._training, order))
        sent = (self._sent() - before) / plan.steps
        accuracy, test_loss = digits.judge(model, *self._test)
        _, loss = digits.judge(model, *self._training)
        return Run(
            **dataclasses.asdict(plan), accuracy=accuracy, test_loss=test_loss,
            loss=loss, sent=sent,
        )  # fmt: skip

    def _sent(self) -> int:
        """Return the bytes that the first replica has sent, also within its group if it has one."""
        every = {reducer.team.communicators[0] for reducer in self._strategy.reducers}
        every.add(self._strategy.extended.group.communicators[0])
        return sum(total.sent for own in every for total in own.totals().values())


def _batches(training: tuple[Any, Any], order: np.ndarray) -> Any:
    import tensorflow as tf

    samples, answers = training
    return tf.data.Dataset.from_tensor_slices(order).map(
        lambda rows: (tf.gather(samples, rows), tf.gather(answers, rows))
    )


def orders(
    kinds: Any, replicas: int, shares: str, samples: int, steps: int, seed: int
) -> np.ndarray:
    """Return the numbers of the samples of each step.

    A step is a row; each replica has an equal part of the row.

    Example:
        >>> kinds = np.array([1, 0, 1, 0])
        >>> orders(kinds, 2, "sorted", samples=1, steps=2, seed=0)[:, 0] % 2  # only zeros
        array([1, 1])
    """
    random = np.random.default_rng(seed)
    own = np.array_split(np.argsort(kinds, kind="stable"), replicas)
    if shares == "mixed":
        own = np.array_split(random.permutation(len(kinds)), replicas)
    most = min(map(len, own)) // samples  # steps of an epoch, until a replica lacks samples
    if not most:
        raise ValueError(
            f"{replicas} replicas cannot have {samples} samples each in a step: the task has "
            f"{len(kinds)} samples. Give a smaller --batch"
        )
    epoch = [
        [random.permutation(rows)[: most * samples].reshape(most, samples) for rows in own]
        for _ in range(-(-steps // most))
    ]
    return np.concatenate([np.concatenate(parts, axis=1) for parts in epoch])[:steps]


# ---------------------------------------------------------------------------
# Results.


def make_table(runs: Sequence[Run], title: str) -> Table:
    """Return the table that users see."""
    names = (
        "rate",
        "accuracy, %",
        "points from the first",
        "perplexity",
        "bytes of a step",
        "less",
    )
    numbers = *names, *(f"ms, {link}" for link in LINKS)
    table = new_table(title, ["rule"], numbers, pad_edge=False, title_style=None)
    rules = dict.fromkeys(run.rule for run in runs)
    first, *others = [best([run for run in runs if run.rule == rule]) for rule in rules]
    for same in (first, *others):
        points = [run.accuracy - one.accuracy for run, one in zip(same, first, strict=True)]
        sent = same[0].sent
        table.add_row(
            same[0].rule,
            f"{same[0].rate:g}",
            spread([run.accuracy for run in same], ".2f"),
            "" if same is first else spread(points, "+.2f"),
            spread([perplexity(run.test_loss) for run in same], ".3f"),
            f"{sent:,.0f}",
            f"{first[0].sent / sent:.1f}x",
            *(f"{1000 * seconds * sent:.3g}" for seconds in LINKS.values()),
        )
    return table


def best(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with the rate of the least mean training loss; NaN counts as infinite."""
    rates = dict.fromkeys(run.rate for run in runs)
    tried = [[run for run in runs if run.rate == rate] for rate in rates]

    def loss(same: list[Run]) -> float:
        mean = statistics.mean(run.loss for run in same)
        return math.inf if math.isnan(mean) else mean

    return min(tried, key=loss)
