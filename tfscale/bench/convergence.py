"""``tfscale bench convergence``: how well a model learns on each wire.

Four replicas learn scikit-learn's digits, with several seeds for each wire. The seed
is that of the weights and of the order of the images; the images are always the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfscale.bench import digits, machine
from tfscale.bench.command import list_of, one_of, whole_number
from tfscale.bench.trainings import compare, spread
from tfscale.wires import FORMATS, LOSSLESS, WIRES

if TYPE_CHECKING:
    from rich.table import Table

REPLICAS = 4
ALGORITHM = "ring"  # rounds more often than any other
BATCH = 64
MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: ``accuracy`` in % of the test images, ``loss`` of the training images."""

    wire: str
    feedback: bool
    seed: int
    accuracy: float
    loss: float


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    arguments = make_parser().parse_args(argv)
    words = (
        f"{REPLICAS} replicas, {ALGORITHM}; "
        f"{arguments.epochs} epochs of {digits.TRAINING} images, {BATCH} at a time; "
        f"SGD, rate {arguments.rate}, momentum {MOMENTUM}"
    )
    return compare(
        "convergence", argv, arguments, train_all, lambda runs: [make_table(runs)], words
    )


def make_parser() -> argparse.ArgumentParser:
    """The options of ``tfscale bench convergence``."""
    parser = argparse.ArgumentParser(
        prog="tfscale bench convergence",
        description="How well a model learns on each wire, with and without error feedback.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--wires", type=list_of(one_of(WIRES)), default=",".join(WIRES), metavar="NAME,...",
        help="fp32 is always there, to be compared with (default: all)")  # fmt: skip
    add("--seeds", type=whole_number, default=5, metavar="N", help="(default: %(default)s)")
    add("--epochs", type=whole_number, default=30, metavar="N", help="(default: %(default)s)")
    add("--rate", type=float, default=0.02, metavar="R",
        help="how far a step goes (default: %(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the result of each training to FILE")
    return parser


def contestants(wires: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Wires, and whether they give back what they lost; the lossless one first."""
    yield LOSSLESS, False
    for wire in wires:
        if FORMATS[wire].feedback:
            yield wire, True
        if wire != LOSSLESS:
            yield wire, False


def train_all(arguments: argparse.Namespace, show: Any) -> Iterator[Run]:
    """Trains on each wire, with each seed."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    machine.split_cpu(REPLICAS)
    data = digits.load()
    names = list(contestants(arguments.wires))
    for seed in range(arguments.seeds):
        for number, (wire, feedback) in enumerate(names):
            done = (seed * len(names) + number) / (arguments.seeds * len(names))
            show(f"seed {seed}, {label(wire, feedback)}", done)
            yield train(wire, feedback, seed, arguments, data)


def train(wire: str, feedback: bool, seed: int, arguments: argparse.Namespace, data: Any) -> Run:
    """One training, and what it came to."""
    import keras

    from tfscale import ScaleStrategy

    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    with ScaleStrategy(ALGORITHM, wire, error_feedback=feedback).scope():
        model = make_model(arguments.rate)
    training, test = data
    batches = digits.batches(training, BATCH, arguments.epochs)
    model.fit(batches, shuffle=False, verbose=0)
    _, loss = digits.judge(model, *training)
    accuracy, _ = digits.judge(model, *test)
    return Run(wire, feedback, seed, accuracy, loss)


def make_model(rate: float) -> Any:
    """The model that all of these trainings begin with."""
    import keras

    model = digits.perceptron()
    model.compile(
        keras.optimizers.SGD(rate, MOMENTUM),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def label(wire: str, feedback: bool) -> str:
    """What tables call a wire."""
    return f"{wire} with error feedback" if feedback else wire


def make_table(runs: Sequence[Run]) -> Table:
    """The table that users see."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("wire")
    table.add_column("feedback")
    for name in ("accuracy, %", "points from fp32", "training loss"):
        table.add_column(name, justify="right")
    exact = [run.accuracy for run in runs if run.wire == LOSSLESS]
    for wire, feedback in dict.fromkeys((run.wire, run.feedback) for run in runs):
        same = [run for run in runs if (run.wire, run.feedback) == (wire, feedback)]
        found = [run.accuracy for run in same]
        points = [a - b for a, b in zip(found, exact, strict=True)]
        table.add_row(
            wire,
            "yes" if feedback else "no",
            spread(found, ".2f"),
            "" if wire == LOSSLESS else spread(points, "+.2f"),
            spread([run.loss for run in same], ".4f"),
        )
    return table
