"""``tfscale bench curvature``: sharpness by batch, and batches that grow as the loss gets flatter.

Perceptrons learn scikit-learn's digits, and labels that another perceptron gives, on one device.

- Sharpness: for each batch size, a model trains until the training loss is small, with the same
  rate and seeds. Then the benchmark measures the largest eigenvalue and the trace of the Hessian
  on all training samples.
- Growth: models train with a small batch, a large batch, a batch that grows by curvature, and a
  batch that grows while some samples are adversarial. All make the same number of passes over the
  data. Rates are in proportion to batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfscale.tools.bench import digits
from tfscale.tools.bench.command import bench_parser, list_of, one_of, whole_number
from tfscale.tools.bench.table import new_table
from tfscale.tools.bench.trainings import compare, spread

if TYPE_CHECKING:
    from rich.table import Table

RATE, MOMENTUM = 0.02, 0.9
SMALL, LARGE = 32, 512
LEARNT = 0.02  # the training loss at which sharpness is compared
LONGEST = 500  # passes until that loss, at most
EPSILON, SHARE = 0.05, 0.2
MEASURED = 256  # training samples on which BatchGrowth measures curvature
PATIENCE = 5
SHARPNESS = "sharpness"


@dataclasses.dataclass(frozen=True)
class Run:
    """Result of a training.

    Attributes:
        task: ``SHARPNESS`` or a key of ``TASKS``.
        way: the batch size if the task is ``SHARPNESS``, else a key of ``WAYS``.
        seed: seed of the first weights and of the order of the data.
        updates: number of updates.
        accuracy: accuracy on the test samples, in %.
        robust: accuracy on test samples that FGSM has moved by ``EPSILON``, in %.
        loss: loss on the training samples.
        top: the Hessian's largest eigenvalue on the training samples.
        trace: estimate of the sum of all eigenvalues.
    """

    task: str
    way: str
    seed: int
    updates: int
    accuracy: float
    robust: float
    loss: float
    top: float
    trace: float


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench curvature``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    words = (
        f"SGD, momentum {MOMENTUM}, rate {RATE} for a batch of {SMALL}; sharpness: this rate for "
        "all "
        f"batches, until the loss is {LEARNT}; growth: {arguments.epochs} passes; robust: "
        "accuracy on test "
        f"samples that FGSM has moved by {EPSILON}"
    )
    return compare("curvature", argv, arguments, train_all, make_tables, words)


def make_parser() -> argparse.ArgumentParser:
    parser = bench_parser(
        "curvature", "Measure sharpness by batch, and batches that grow as the loss gets flatter."
    )
    add = parser.add_argument
    add("--batches", type=list_of(whole_number), default="16,64,256,1000", metavar="N,...",
        help="batch sizes whose sharpness is compared (default: %(default)s)")  # fmt: skip
    add("--tasks", type=list_of(one_of(TASKS)), default=",".join(TASKS), metavar="NAME,...",
        help="tasks of the growing batches (default: %(default)s)")  # fmt: skip
    add("--seeds", type=whole_number, default=5, metavar="N",
        help="trainings of each kind (default: %(default)s)")  # fmt: skip
    add("--epochs", type=whole_number, default=30, metavar="N",
        help="passes over the data with growing batches (default: %(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="add a line for each training to FILE")
    return parser


# ---------------------------------------------------------------------------
# Tasks.


def synthetic() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return normally distributed samples with classes that a random perceptron gives.

    A tenth of the training samples get a random class.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, 20)).astype(np.float32)
    hidden = np.maximum(x @ rng.standard_normal((20, 30)), 0)
    y = (hidden @ rng.standard_normal((30, 10))).argmax(1).astype(np.int32)
    training = y[:1000].copy()
    wrong = rng.random(1000) < 0.1
    training[wrong] = rng.integers(0, 10, wrong.sum())
    return (x[:1000], training), (x[1000:], y[1000:])


TASKS: dict[str, Callable[[], Any]] = {"digits": digits.load, "synthetic": synthetic}


def make_model(shape: tuple[int, ...], rate: float, seed: int) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layers = keras.layers
    hidden = [layers.Dense(64, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input(shape), layers.Flatten(), *hidden, layers.Dense(10)])
    model.compile(
        keras.optimizers.SGD(rate, MOMENTUM),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


# ---------------------------------------------------------------------------
# Training.


def train_all(arguments: argparse.Namespace, show: Any) -> Iterator[Run]:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    wanted: list[tuple[str, str, Callable[..., Any]]] = [
        (SHARPNESS, str(batch), until_learnt) for batch in arguments.batches
    ]
    wanted += [(task, way, WAYS[way]) for task in arguments.tasks for way in WAYS]
    for seed in range(arguments.seeds):
        for number, (task, way, train) in enumerate(wanted):
            show(f"seed {seed}, {task}, {way}", (seed + number / len(wanted)) / arguments.seeds)
            (x, y), test = TASKS["digits" if task == SHARPNESS else task]()
            start = make_model(x.shape[1:], RATE, seed)
            model = train(start, x, y, int(way) if task == SHARPNESS else arguments.epochs)
            yield judged(task, way, seed, model, (x, y), test)


def until_learnt(model: Any, x: Any, y: Any, batch: int) -> Any:
    import keras

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            passed = (number + 1) % max(1, len(x) // batch) == 0
            if passed and digits.judge(self.model, x, y)[1] <= LEARNT:
                self.model.stop_training = True

    model.fit(digits.batches((x, y), batch, LONGEST), verbose=0, callbacks=[Stop()])
    return model


def fixed(batch: int, model: Any, x: Any, y: Any, epochs: int) -> Any:
    model.optimizer.learning_rate = RATE * batch / SMALL
    model.fit(digits.batches((x, y), batch, epochs), verbose=0)
    return model


def growing(share: float, model: Any, x: Any, y: Any, epochs: int) -> Any:
    import tensorflow as tf

    from tfscale.callbacks import Adversarial, BatchGrowth
    from tfscale.training.adversarial import FGSM

    growth = BatchGrowth.by_curvature(
        SMALL, LARGE, x[:MEASURED], y[:MEASURED],
        samples=len(x), batch_size=MEASURED, patience=PATIENCE,
    )  # fmt: skip
    shared = growth.share(share, epochs // 2)
    others = [Adversarial(FGSM(EPSILON), share=shared)] if share else []
    data = growth.batches(tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)))
    model.fit(data, epochs=epochs, verbose=0, callbacks=[growth, *others])
    return model


WAYS: dict[str, Callable[..., Any]] = {
    f"batch {SMALL}": lambda *given: fixed(SMALL, *given),
    f"batch {LARGE}": lambda *given: fixed(LARGE, *given),
    "grows": lambda *given: growing(0.0, *given),
    "grows, adversarial": lambda *given: growing(SHARE, *given),
}


def judged(task: str, way: str, seed: int, model: Any, training: Any, test: Any) -> Run:
    from tfscale.analysis import curvature
    from tfscale.training.adversarial import FGSM, examples

    _, loss = digits.judge(model, *training)
    accuracy, _ = digits.judge(model, *test)
    x, y = test
    robust, _ = digits.judge(model, examples(model, x, y, FGSM(EPSILON)), y)
    hessian = curvature.Hessian(model, *training, batch_size=len(training[0]))
    top, trace = hessian.eigenvalues(top=1).top[0], hessian.trace(samples=32).value
    updates = int(model.optimizer.iterations)
    return Run(task, way, seed, updates, accuracy, robust, loss, top, trace)


# ---------------------------------------------------------------------------
# Results.


def make_tables(runs: Sequence[Run]) -> Iterator[Table]:
    for task in dict.fromkeys(run.task for run in runs):
        yield make_table(task, [run for run in runs if run.task == task])


def make_table(task: str, runs: Sequence[Run]) -> Table:
    columns = {
        "updates": ".0f", "accuracy": ".2f", "robust": ".2f", "loss": ".4f", "top": ".2f",
        "trace": ".1f",
    }  # fmt: skip
    table = new_table(task, ["batch"], columns, pad_edge=False)
    for way in dict.fromkeys(run.way for run in runs):
        same = [run for run in runs if run.way == way]
        numbers = [
            spread([getattr(run, name) for run in same], how) for name, how in columns.items()
        ]
        table.add_row(way.removeprefix("batch "), *numbers)
    return table
