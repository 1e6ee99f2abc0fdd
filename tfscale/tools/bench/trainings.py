"""Helpers of benchmarks that measure learning: they do one training after another."""

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

from tfscale.tools.bench import machine
from tfscale.tools.bench.command import check_folders, make_console, progress

if TYPE_CHECKING:
    from rich.table import Table

Run = TypeVar("Run")
Plan = TypeVar("Plan")


class Learner:
    """Model and optimizer, which are traced once: each training resets all their variables.

    Args:
        make: function that returns a model with logits that is not compiled.
        optimizer: function that returns an optimizer.
        strategy: strategy that trains the model; None for no strategy.
        steps_at_once: number of steps per call of Keras's training function.
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
                jit_compile=False,  # XLA would compile once for each batch size
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
        """Train the model from new weights and return it.

        Args:
            seed: seed of the weights, and of the order of what ``batches`` returns.
            rate: learning rate.
            batches: function that returns the data set of all batches.
            callbacks: callbacks of Keras.
        """
        import keras

        keras.utils.set_random_seed(seed)
        self._model.set_weights(self._make().get_weights())
        for variable, value in zip(self._optimizer.variables, self._begin, strict=True):
            variable.assign(value)
        self._optimizer.learning_rate = rate
        if self._strategy:
            from tfscale.exchange.slots import Slots

            Slots.of(self._optimizer, self._strategy).load_own_variables({})
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
    """Train, show the tables, and write all results to ``arguments.json``; return the exit status.

    That file gets a line for each training as soon as the training ends.

    Args:
        name: name of the benchmark.
        argv: words of the command line.
        arguments: parsed command line.
        train_all: function that yields a dataclass for each training; its second argument is a
            function that shows progress.
        tables: function that returns the tables of all trainings.
        words: meaning of the tables' numbers.
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
        took += f" for {new} of {len(trained)} trainings; {arguments.json} had the others"
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
    """Return the trainings in a file, which has one in each line."""
    if file is None or not file.exists():
        return []
    try:
        return [kind(**json.loads(line)) for line in file.read_text().splitlines()]
    except (TypeError, ValueError) as error:
        raise OSError(
            f"{file} has lines that are not trainings of this benchmark: {error}. Give --json "
            "another name"
        ) from error


def each_once(
    planned: Sequence[Plan], known: Sequence[Run], train: Callable[[Plan], Run], show: Any
) -> Iterator[Run]:
    """Yield the known result of each planned training, or do the training.

    Args:
        planned: dataclasses; a ``Run`` adds results to their fields.
        known: results of earlier trainings, which are not repeated.
        train: function that does one training.
        show: function that shows progress.
    """
    for number, plan in enumerate(planned):
        show(str(plan), number / len(planned))
        same = (run for run in known if vars(plan).items() <= vars(run).items())
        yield next(same, None) or train(plan)


def _add(file: Path | None, run: Any) -> bool:
    """Add a run to a file as a line; return False if the file already has it."""
    if file is None:
        return True
    line = _line(run)
    if line in map(_line, read(file, type(run))):  # compare texts, since NaN != NaN
        return False
    with file.open("a") as lines:
        lines.write(line + "\n")
    return True


def _line(run: Any) -> str:
    return json.dumps(dataclasses.asdict(run))


def perplexity(loss: float) -> float:
    """Return e to the power of a loss: the number of equally likely words with this loss."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def spread(numbers: Sequence[float], how: str) -> str:
    """Return mean and standard deviation as text."""
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
    return f"{statistics.mean(numbers):{how}} ± {deviation:{how.lstrip('+')}}"
