"""What benchmarks of learning share: one training after another."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tfscale.bench import machine
from tfscale.bench.command import check_folders, make_console, progress

if TYPE_CHECKING:
    from rich.table import Table

Run = TypeVar("Run")
Plan = TypeVar("Plan")


class Learner:
    """A model and its optimizer, traced once: each training sets all their variables anew.

    Args:
        make: makes a model that is not compiled and gives logits.
        optimizer: makes one.
        strategy: that trains it, if there is one.
        steps_at_once: without Python in between.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        optimizer: Callable[[], Any],
        strategy: Any = None,
        steps_at_once: int = 1,
    ) -> None:
        import keras

        self._make, self._strategy = make, strategy
        with strategy.scope() if strategy else contextlib.nullcontext():
            self._model = make()
            self._model.compile(
                optimizer(),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                jit_compile=False,  # else XLA compiles once for each size of a batch
                steps_per_execution=steps_at_once,
            )
            self._optimizer = self._model.optimizer
            self._optimizer.build(self._model.trainable_variables)
        self._begin = [variable.numpy() for variable in self._optimizer.variables]

    def fit(
        self,
        seed: int,
        rate: float,
        batches: Callable[[], Any],
        callbacks: Sequence[Any] = (),
    ) -> Any:
        """Train it from the beginning; returns the model.

        Args:
            seed: of its weights, and of the order of what ``batches`` gives.
            rate: of learning.
            batches: makes them.
            callbacks: of Keras.
        """
        import keras

        keras.utils.set_random_seed(seed)
        self._model.set_weights(self._make().get_weights())
        for variable, value in zip(self._optimizer.variables, self._begin, strict=True):
            variable.assign(value)
        self._optimizer.learning_rate = rate
        if self._strategy:
            from tfscale.exchange.state import ExchangeState

            ExchangeState.of(self._optimizer, self._strategy).load_own_variables({})
        self._model.fit(batches(), shuffle=False, verbose=0, callbacks=list(callbacks))
        return self._model


def compare(
    name: str,
    argv: Sequence[str],
    arguments: argparse.Namespace,
    train_all: Callable[[argparse.Namespace, Any], Iterator[Any]],
    tables: Callable[[Sequence[Any]], Iterable[Table]],
    words: str,
) -> int:
    """Train, show the tables, and write all to ``arguments.json``; returns the exit status.

    That file has a line for each training, as soon as it is done.

    Args:
        name: of the benchmark.
        argv: what the user typed.
        arguments: what it means.
        train_all: yields a dataclass for each training, and is given what shows progress.
        tables: of all trainings.
        words: what the tables' numbers are.
    """
    about = machine.describe()
    console = make_console()
    start = time.monotonic()
    try:
        check_folders(arguments.json)
        with progress(console) as show:
            trained, new = [], 0
            for run in train_all(arguments, show):
                trained.append(run)
                new += _add(arguments.json, run)
    except (ImportError, OSError) as error:
        print(f"tfscale bench: error: {error}", file=sys.stderr)
        return 1
    took = f"{time.monotonic() - start:.0f} s"
    if new < len(trained):
        took += f" for {new} of {len(trained)} trainings, {arguments.json} had the others"
    for table in tables(trained):
        console.print(table)
    console.print(
        f"mean ± standard deviation of {arguments.seeds} seeds; {words}; {took}\n"
        f"machine: {about['cpu']}, {about['cores']} cores; TensorFlow {about['tensorflow']}; "
        f"tfscale {about['tfscale']}\n"
        f"command: {shlex.join(['tfscale', 'bench', name, *argv])}",
        soft_wrap=True,
    )
    return 0


def read(file: Path | None, kind: type[Run]) -> list[Run]:
    """The trainings that a file has, one in each line."""
    if file is None or not file.exists():
        return []
    try:
        return [kind(**json.loads(line)) for line in file.read_text().splitlines()]
    except (TypeError, ValueError) as error:
        raise OSError(
            f"{file} is to have a line for each training of this benchmark, and has others: "
            f"{error}. Give --json another name"
        ) from error


def each_once(
    planned: Sequence[Plan], known: Sequence[Run], train: Callable[[Plan], Run], show: Any
) -> Iterator[Run]:
    """What is known of each training, or what it comes to now.

    Args:
        planned: dataclasses, to whose fields a ``Run`` adds what came of it.
        known: trainings that are not done again.
        train: does one.
        show: progress.
    """
    for number, plan in enumerate(planned):
        show(str(plan), number / len(planned))
        same = (run for run in known if vars(plan).items() <= vars(run).items())
        yield next(same, None) or train(plan)


def _add(file: Path | None, run: Any) -> bool:
    """As a line, if the file has not got it; returns whether it had not."""
    if file is None:
        return True
    line = _line(run)
    if line in map(_line, read(file, type(run))):  # as texts: a number that is none equals no other
        return False
    with file.open("a") as lines:
        lines.write(line + "\n")
    return True


def _line(run: Any) -> str:
    return json.dumps(dataclasses.asdict(run))


def perplexity(loss: float) -> float:
    """Of how many words that are equally likely such a loss would be."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def spread(numbers: Sequence[float], how: str) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
    return f"{statistics.mean(numbers):{how}} ± {deviation:{how.lstrip('+')}}"
