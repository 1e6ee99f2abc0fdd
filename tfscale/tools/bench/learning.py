"""``tfscale bench learning``: how well optimizers learn with small, large and full batches.

A multilayer perceptron learns scikit-learn's digits on one device, with every optimizer, every
batch size, and with and without a warm-up. All trainings make the same number of passes over the
images, so larger batches have fewer updates. The benchmark chooses learning rates with a seed
and with images that the results do not use.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfscale.tools.bench import digits, trainings
from tfscale.tools.bench.command import bench_parser, list_of, one_of, whole_number
from tfscale.tools.bench.table import new_table
from tfscale.tools.bench.trainings import compare, spread

if TYPE_CHECKING:
    from rich.table import Table

TRAINING = 1437  # images out of 1,797: four fifths
VALIDATION = 360  # training images that trials do not learn from: they choose the rate
CHOICE = 100  # seed of the trials that choose the rate
FULL = "full"

RATES = {
    "SGD": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "Adam": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1),
    "AdamW": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1),
    "LARS": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    "LARS-0.02": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    "LAMB": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "AdaHessian": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
}
OURS = ("LARS", "LARS-0.02", "LAMB", "AdaHessian")

NOISE = 3  # standard errors; a smaller difference counts as noise


@dataclasses.dataclass(frozen=True)
class Setting:
    """Choices in which trainings differ."""

    optimizer: str
    batch: int | str  # FULL: all training images
    warmup: bool


@dataclasses.dataclass(frozen=True)
class Run:
    """Result of a training.

    Attributes:
        accuracy: accuracy on images that the training has not seen, in %.
        loss: loss on the training images.
        trial: whether the training only helped to choose the rate.
    """

    optimizer: str
    batch: int | str
    warmup: bool
    rate: float
    seed: int
    accuracy: float
    loss: float
    trial: bool = False

    @property
    def setting(self) -> Setting:
        """Optimizer, batch and warm-up of this training."""
        return Setting(self.optimizer, self.batch, self.warmup)


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench learning``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    words = (
        f"{arguments.epochs} epochs of "
        f"{TRAINING} images, warm-up {arguments.warmup} epochs; points: difference to the best "
        "stock "
        "optimizer with the same batch and warm-up; *: the rate is at the end of the grid"
    )

    def tables(trained: Sequence[Run]) -> Iterator[Table]:
        for batch in arguments.batches:
            yield make_table(batch, [r for r in trained if r.batch == batch and not r.trial])

    return compare("learning", argv, arguments, train_all, tables, words)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench learning``."""
    parser = bench_parser(
        "learning", "Measure how well optimizers learn with small, large and full batches."
    )
    add = parser.add_argument
    add("--optimizers", type=list_of(one_of(RATES)), default=",".join(RATES), metavar="NAME,...",
        help="optimizers to compare (default: %(default)s)")  # fmt: skip
    add("--batches", type=list_of(_batch), default=f"32,512,{FULL}", metavar="N,...",
        help="batch sizes; full: all images (default: %(default)s)")  # fmt: skip
    add("--seeds", type=whole_number, default=5, metavar="N",
        help="trainings with each setting (default: %(default)s)")  # fmt: skip
    add("--epochs", type=whole_number, default=30, metavar="N",
        help="passes over the images (default: %(default)s)")  # fmt: skip
    add("--warmup", type=whole_number, default=5, metavar="N",
        help="epochs of the warm-up in trainings that have one (default: %(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="add a line for each training to FILE")
    return parser


def _batch(text: str) -> int | str:
    return text if text == FULL else whole_number(text)


# ---------------------------------------------------------------------------
# Training.


def train_all(arguments: argparse.Namespace, show: Any) -> Iterator[Run]:
    """Train each optimizer in each setting, with each rate and seed."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    (x, y), test = digits.load(TRAINING)
    known = (x[:-VALIDATION], y[:-VALIDATION])
    unknown = (x[-VALIDATION:], y[-VALIDATION:])
    settings = [(batch, warmup) for batch in arguments.batches for warmup in (False, True)]
    for i, name in enumerate(arguments.optimizers):
        learner = Learner(name, arguments.epochs, arguments.warmup)
        for j, (batch, warmup) in enumerate(settings):
            done = (i + j / len(settings)) / len(arguments.optimizers)
            show(f"{name}, batch {batch}{', warm-up' if warmup else ''}", done)
            setting = Setting(name, batch, warmup)
            tried = [learner.run(setting, rate, CHOICE, known, unknown) for rate in RATES[name]]
            yield from (dataclasses.replace(run, trial=True) for run in tried)
            rate = best(tried).rate
            for seed in range(arguments.seeds):
                yield learner.run(setting, rate, seed, (x, y), test)


def best(tried: Sequence[Run]) -> Run:
    """Return the run with the highest accuracy; among equals, the run with the least loss."""
    return max(tried, key=lambda run: (run.accuracy, -run.loss))


class Learner:
    """Perceptron with one optimizer."""

    def __init__(self, name: str, epochs: int, warmup: int) -> None:
        self._epochs, self._warmup = epochs, warmup
        self._learner = trainings.Learner(digits.perceptron, lambda: make_optimizer(name))

    def run(self, setting: Setting, rate: float, seed: int, training: Any, test: Any) -> Run:
        """Do one training from new weights and return its result."""
        from tfscale.callbacks import Warmup

        count = len(training[0])
        batch = count if setting.batch == FULL else int(setting.batch)
        steps = math.ceil(count / batch)
        callbacks = [Warmup(steps=self._warmup * steps)] if setting.warmup else []
        batches = functools.partial(digits.batches, training, batch, self._epochs)
        model = self._learner.fit(seed, rate, batches, callbacks)
        _, loss = digits.judge(model, *training)
        accuracy, _ = digits.judge(model, *test)
        return Run(
            **dataclasses.asdict(setting), rate=rate, seed=seed, accuracy=accuracy, loss=loss
        )


def make_optimizer(name: str) -> Any:
    """Return an optimizer with usual settings; the caller sets its rate."""
    from keras import optimizers

    from tfscale.training.optimizers import LAMB, LARS, AdaHessian

    makers: dict[str, Callable[[], Any]] = {
        "SGD": lambda: optimizers.SGD(momentum=0.9),
        "Adam": optimizers.Adam,
        "AdamW": lambda: optimizers.AdamW(weight_decay=0.01),
        "LARS": lambda: LARS(weight_decay=1e-4),
        "LARS-0.02": lambda: LARS(weight_decay=1e-4, trust_coefficient=0.02),
        "LAMB": lambda: LAMB(weight_decay=0.01),
        "AdaHessian": AdaHessian,
    }
    return makers[name]()


# ---------------------------------------------------------------------------
# Results.


def make_table(batch: int | str, runs: Sequence[Run]) -> Table:
    """Return the table that users see."""
    words, numbers = ["optimizer", "warm-up"], ["rate", "accuracy, %", "training loss", "points"]
    table = new_table(f"batch {batch}", words, numbers, pad_edge=False)
    table.add_column("against the best other")
    by_setting: dict[Setting, list[Run]] = {}
    for run in runs:
        by_setting.setdefault(run.setting, []).append(run)
    for setting, same in by_setting.items():
        rate, ends = same[0].rate, (RATES[setting.optimizer][0], RATES[setting.optimizer][-1])
        rival = best_of_others(setting, by_setting) if setting.optimizer in OURS else None
        points = differences(same, rival) if rival else []
        table.add_row(
            setting.optimizer,
            "yes" if setting.warmup else "no",
            f"{rate:g}{'*' if rate in ends else ''}",
            spread([run.accuracy for run in same], ".2f"),
            spread([run.loss for run in same], ".4f"),
            spread(points, "+.2f") if rival else "",
            f"{verdict(points)} {rival[0].optimizer}" if rival else "",
        )
    return table


def best_of_others(setting: Setting, by_setting: dict[Setting, list[Run]]) -> list[Run] | None:
    """Return the runs of the best stock optimizer with the same batch and warm-up.

    The best optimizer has the highest mean accuracy.
    """
    same = [dataclasses.replace(setting, optimizer=name) for name in RATES if name not in OURS]
    found = [by_setting[other] for other in same if other in by_setting]
    return max(found, key=lambda runs: statistics.mean(r.accuracy for r in runs), default=None)


def differences(runs: Sequence[Run], others: Sequence[Run]) -> list[float]:
    """Return the difference in accuracy for each seed, in points."""
    return [a.accuracy - b.accuracy for a, b in zip(runs, others, strict=True)]


def verdict(points: Sequence[float]) -> str:
    """Return a comparison in words; means within ``NOISE`` standard errors of zero are noise."""
    mean = statistics.mean(points)
    error = statistics.stdev(points) / math.sqrt(len(points)) if len(points) > 1 else math.inf
    if abs(mean) <= NOISE * error:
        return "within noise of"
    return "better than" if mean > 0 else "worse than"
