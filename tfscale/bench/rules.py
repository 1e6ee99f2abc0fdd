"""``tfscale bench rules``: how well a model learns where replicas agree once in many steps.

Replicas of one process learn scikit-learn's digits by each rule, with equal samples in equal order.
Either each replica's share of a batch is drawn from all images, or each replica has digits of its
own, as where data cannot leave the place that it comes from.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfscale.bench import digits, machine, trainings
from tfscale.bench.command import list_of, one_of, whole_number
from tfscale.bench.methods import checked_rule, rule_of
from tfscale.bench.trainings import compare, spread

if TYPE_CHECKING:
    from rich.table import Table

SHARES = ("mixed", "sorted")
RULES = (
    "EveryStep()",
    *(f"LocalSGD({every})" for every in (4, 16, 64)),
    *(f"DiLoCo({every})" for every in (10, 50, 200)),
    "DiLoCo(50, wire='int8')",
    "ElasticAveraging(10, alpha=0.1)",
    "Gossip()",
    "Gossip(16, 'ring')",
)
STEPS_AT_ONCE = 8  # in one call of Keras's, which takes longer than these steps
LINKS = {"100 Mbit/s": 8 / 100e6, "10 Gbit/s": 8 / 10e9}  # seconds for each byte


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Args:
        rule: by which replicas agreed.
        replicas: how many there were.
        shares: of each replica: ``"mixed"`` or ``"sorted"`` by digit.
        seed: of the weights and of the order of the images.
        steps: that were made.
        accuracy: in % of the test images.
        loss: of the training images.
        sent: bytes that the first replica sent for each step, the end of ``fit`` included.
    """

    rule: str
    replicas: int
    shares: str
    seed: int
    steps: int
    accuracy: float
    loss: float
    sent: float


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    arguments = make_parser().parse_args(argv)
    words = (
        f"{arguments.epochs} epochs of {digits.TRAINING} images, {arguments.samples} for each "
        f"replica and step; SGD, rate {arguments.rate}, momentum 0.9; ms: that the bytes of a "
        "step take on a link of that rate, on average"
    )

    def tables(runs: Sequence[Run]) -> Iterator[Table]:
        for kind in itertools.product(arguments.replicas, arguments.shares):
            same = [run for run in runs if (run.replicas, run.shares) == kind]
            yield make_table(same, f"{kind[0]} replicas, {kind[1]} data")

    return compare("rules", argv, arguments, train_all, tables, words)


def make_parser() -> argparse.ArgumentParser:
    """The options of ``tfscale bench rules``."""
    parser = argparse.ArgumentParser(
        prog="tfscale bench rules",
        description="How well a model learns where replicas agree once in many steps.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--rules", type=checked_rule, nargs="+", default=RULES, metavar="RULE",
        help="such as \"DiLoCo(50, wire='int8')\"; all are compared with the first "
        "(default: %(default)s)")  # fmt: skip
    add("--replicas", type=list_of(whole_number), default="2,4,8", metavar="N,...",
        help="(default: %(default)s)")  # fmt: skip
    add("--shares", type=list_of(one_of(SHARES)), default=",".join(SHARES), metavar="NAME,...",
        help="mixed: each replica has a random part of the images, always the same; sorted: each "
        "has some digits, and hardly any others (default: %(default)s)")  # fmt: skip
    add("--seeds", type=whole_number, default=3, metavar="N", help="(default: %(default)s)")
    add("--epochs", type=whole_number, default=40, metavar="N", help="(default: %(default)s)")
    add("--samples", type=whole_number, default=8, metavar="N",
        help="of each replica in a step (default: %(default)s)")  # fmt: skip
    add("--rate", type=float, default=0.02, metavar="R",
        help="how far a step goes (default: %(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the result of each training to FILE")
    return parser


def train_all(arguments: argparse.Namespace, show: Any) -> Iterator[Run]:
    """Trains by each rule, with each seed."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    machine.split_cpu(max(arguments.replicas))
    data = digits.load()
    planned = list(itertools.product(arguments.replicas, arguments.rules))
    for number, (replicas, rule) in enumerate(planned):
        learner = Learner(rule, replicas, data)
        for shares, seed in itertools.product(arguments.shares, range(arguments.seeds)):
            show(f"{replicas} replicas, {shares}, {rule}, seed {seed}", number / len(planned))
            yield learner.run(shares, seed, arguments)


class Learner:
    """The model on all replicas, which agree by one rule."""

    def __init__(self, rule: str, replicas: int, data: Any) -> None:
        import keras

        from tfscale import ScaleStrategy

        keras.backend.clear_session()
        self._rule, self._replicas, self._data = rule, replicas, data
        devices = [f"CPU:{number}" for number in range(replicas)]
        self._strategy = ScaleStrategy("ring", devices=devices, sync=rule_of(rule))
        self._learner = trainings.Learner(
            digits.perceptron,
            lambda: keras.optimizers.SGD(0.1, 0.9),
            self._strategy,
            steps_at_once=STEPS_AT_ONCE,
        )

    def run(self, shares: str, seed: int, arguments: argparse.Namespace) -> Run:
        """One training, and what it came to."""
        (images, truth), test = self._data
        order = orders(truth, self._replicas, shares, arguments.samples, arguments.epochs, seed)
        before = self._sent()
        model = self._learner.fit(seed, arguments.rate, lambda: _batches(images, truth, order))
        sent = (self._sent() - before) / len(order)
        accuracy, _ = digits.judge(model, *test)
        _, loss = digits.judge(model, images, truth)
        return Run(self._rule, self._replicas, shares, seed, len(order), accuracy, loss, sent)

    def _sent(self) -> int:
        """Bytes from the first replica to others, within its group, if it has one, too."""
        every = {reducer.exchange.communicators[0] for reducer in self._strategy.reducers}
        every.add(self._strategy.extended.group.communicators[0])
        return sum(total.sent for own in every for total in own.totals().values())


def _batches(images: Any, truth: Any, order: np.ndarray) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(order).map(
        lambda rows: (tf.gather(images, rows), tf.gather(truth, rows))
    )


def orders(
    truth: Any, replicas: int, shares: str, samples: int, epochs: int, seed: int
) -> np.ndarray:
    """Which images are in each step: a row for a step, of which each replica has an equal part.

    Example:
        >>> truth = np.array([1, 0, 1, 0])
        >>> orders(truth, 2, "sorted", samples=1, epochs=1, seed=0)[:, 0] % 2  # only zeros
        array([1, 1])
    """
    random = np.random.default_rng(seed)
    own = np.array_split(np.argsort(truth, kind="stable"), replicas)
    if shares == "mixed":
        own = np.array_split(random.permutation(len(truth)), replicas)
    steps = min(map(len, own)) // samples
    epoch = [
        [random.permutation(rows)[: steps * samples].reshape(steps, samples) for rows in own]
        for _ in range(epochs)
    ]
    return np.concatenate([np.concatenate(parts, axis=1) for parts in epoch])


def make_table(runs: Sequence[Run], title: str) -> Table:
    """The table that users see."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rule")
    names = ("accuracy, %", "points from the first", "training loss", "bytes of a step", "less")
    for name in (*names, *(f"ms, {link}" for link in LINKS)):
        table.add_column(name, justify="right")
    first = [run for run in runs if run.rule == runs[0].rule]
    for rule in dict.fromkeys(run.rule for run in runs):
        same = [run for run in runs if run.rule == rule]
        points = [run.accuracy - one.accuracy for run, one in zip(same, first, strict=True)]
        sent = same[0].sent
        table.add_row(
            rule,
            spread([run.accuracy for run in same], ".2f"),
            "" if same == first else spread(points, "+.2f"),
            spread([run.loss for run in same], ".4f"),
            f"{sent:,.0f}",
            f"{first[0].sent / sent:.1f}x",
            *(f"{1000 * seconds * sent:.3g}" for seconds in LINKS.values()),
        )
    return table
