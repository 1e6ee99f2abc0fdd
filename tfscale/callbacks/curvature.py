"""A callback that measures the curvature of the loss during training."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from tfscale.analysis import curvature
from tfscale.analysis.curvature.of_model import refuse_other_strategies
from tfscale.analysis.curvature.samples import checked_samples
from tfscale.analysis.curvature.variables import checked_variables
from tfscale.analysis.telemetry.sinks import JsonLines, TensorBoard
from tfscale.bridge.installed import refuse_keras_2
from tfscale.callbacks import progress
from tfscale.support import arguments

EPOCH = "epoch"
VERSION = 1  # version of the JSON lines


class Curvature(keras.callbacks.Callback):
    """A callback that measures the Hessian of the loss, without changing the training.

    The measurements use separate data, which stay the same, so numbers of different epochs are
    comparable: some hundreds of samples of the training data suffice. Weights, optimizer, seeds and
    statistics are bitwise the same as without the callback. All devices and processes of a strategy
    measure together, with the same data; the first process writes the files.

    - ``"trace"``: the sum of all eigenvalues, with its standard error; the JSON lines also have it
      by layer. It costs as many products as ``samples``.
    - ``"top"``: the largest eigenvalue; costs some tens of products.
    - ``"bottom"``: the smallest (most negative) eigenvalue; costs some tens of products.

    If the loss is not finite, the numbers are NaN, a warning says where, and the training
    continues.
    A product is about three times the work of a forward and a backward pass over the data.

    Args:
        x: inputs, or a dataset, as for ``model.evaluate``.
        y: targets.
        sample_weight: weight of each row.
        batch_size: rows of a batch, if ``x`` holds arrays.
        variables: as for ``tfscale.curvature.Hessian``; all trainable variables by default.
        every: ``"epoch"``, or the number of steps between measurements.
        what: a selection of the three measures above.
        samples: number of random vectors of the trace.
        jsonl: a file for JSON lines, one for each measurement. A resumed training appends to it.
        tensorboard: a folder for TensorBoard.
        progress: whether the progress bar and ``History`` show the numbers.

    Example:
        >>> measured = tfscale.callbacks.Curvature(x[:32], y[:32], what=("top",))
        >>> history = model.fit(x, y, epochs=2, verbose=0, callbacks=[measured]).history
        >>> [len(history["curvature_top"]), sorted(measured.measured[-1])]
        [2, ['epoch', 'step', 'top']]
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None = None,
        variables: Any = None,
        every: int | str = EPOCH,
        what: Sequence[str] = ("trace", "top"),
        samples: int = 16,
        jsonl: str | Path | None = None,
        tensorboard: str | Path | None = None,
        progress: bool = True,
    ) -> None:
        super().__init__()
        refuse_keras_2("Curvature measures models of Keras 3")
        if not (isinstance(every, str) and every == EPOCH):
            every = arguments.whole(every, "every", 1, what='"epoch" or a number of steps')
        arguments.data(x, "x")
        arguments.optional(arguments.data, y, "y")
        arguments.optional(arguments.data, sample_weight, "sample_weight")
        expected = f"a list of {', '.join(map(repr, _MEASURES))}"
        what = arguments.items(what, "what", expected, _measure)
        arguments.optional(arguments.whole, batch_size, "batch_size", 1, what="a number of rows")
        checked_variables(variables)
        checked_samples(samples)
        arguments.optional(arguments.path, jsonl, "jsonl")
        arguments.optional(arguments.path, tensorboard, "tensorboard")
        arguments.flag(progress, "progress")
        self.measured: list[dict[str, Any]] = []
        self._data = (x, y, sample_weight)
        self._how = {"batch_size": batch_size, "variables": variables}
        self._every = every
        self._what = what
        self._samples = samples
        self._jsonl = jsonl
        self._tensorboard = tensorboard
        self._progress = progress
        self._hessian: Any = None
        self._lines: JsonLines | None = None
        self._board: TensorBoard | None = None
        self._begun = False
        self._epoch = 0
        self._next = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Check the strategy, and forget the matrix."""
        refuse_other_strategies(self.model, "callbacks.Curvature")
        self._hessian = None  # the model may not be built yet
        self._begun = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch. In the first one, all callbacks have restored what they restore."""
        self._epoch = epoch
        self._begin()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin in a loop of the user without epochs, too."""
        self._begin()

    def _begin(self) -> None:
        """Open the files, and plan the first measurement."""
        if self._begun:
            return
        self._begun = True
        step = progress.steps(self.model)
        goes_on = bool(self.measured) or step > 0
        if isinstance(self._every, int):
            self._next = step + self._every
        writes = self.model.distribute_strategy.extended.should_checkpoint  # True in one process
        if self._jsonl is not None and writes:
            self._lines = JsonLines(Path(self._jsonl), more=goes_on)
            self._lines.write("start", {"version": VERSION, "step": step})
        if self._tensorboard is not None and writes:
            self._board = TensorBoard(Path(self._tensorboard), "curvature")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Measure if it is time, once for each execution at most."""
        if isinstance(self._every, int):
            step = progress.steps(self.model)
            if step >= self._next:
                self._next = step + self._every
                self._measure(step)
        self._show(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Measure, if the callback measures each epoch."""
        if self._every == EPOCH:
            self._measure(progress.steps(self.model))
        if self._progress and logs is not None:  # CSVLogger takes its columns from the first epoch
            logs.update({f"curvature_{name}": math.nan for name in self._what})
        self._show(logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Close the files."""
        for sink in (self._lines, self._board):
            if sink is not None:
                sink.close()
        self._lines = self._board = None

    def _measure(self, step: int) -> None:
        if self._hessian is None:
            self._hessian = curvature.Hessian(self.model, *self._data, **self._how)
        numbers: dict[str, float] = {}
        parts: dict[str, Any] = {}
        try:
            for name in self._what:
                found, of_layers = _MEASURES[name](self._hessian, self._samples)
                numbers |= found
                parts |= of_layers
        except curvature.NotFiniteError as error:
            numbers = dict.fromkeys(self._what, math.nan)
            logging.getLogger("tfscale").warning(
                "Curvature measured nothing after step %d: %s", step, error
            )
        self.measured.append({"epoch": self._epoch, "step": step, **numbers})
        if self._lines is not None:
            self._lines.write("curvature", {**self.measured[-1], **parts})
            self._lines.flush()
        if self._board is not None:
            self._board.write(step, numbers)

    def _show(self, logs: Any) -> None:
        if self._progress and logs is not None and self.measured:
            last = self.measured[-1]
            logs.update({f"curvature_{name}": last[name] for name in self._what})


_Measure = Callable[[Any, int], tuple[dict[str, float], dict[str, Any]]]


def _trace(hessian: Any, samples: int) -> tuple[dict[str, float], dict[str, Any]]:
    found = hessian.trace(samples=samples)
    layers = {name: dataclasses.asdict(one) for name, one in found.layers.items()}
    return {"trace": found.value, "trace_error": found.total.error}, {"layers": layers}


def _top(hessian: Any, samples: int) -> tuple[dict[str, float], dict[str, Any]]:
    return {"top": hessian.eigenvalues(top=1).top[0]}, {}


def _bottom(hessian: Any, samples: int) -> tuple[dict[str, float], dict[str, Any]]:
    return {"bottom": hessian.eigenvalues(top=0, bottom=1).bottom[0]}, {}


_MEASURES: Mapping[str, _Measure] = {"trace": _trace, "top": _top, "bottom": _bottom}


def _measure(name: str, argument: str) -> str:
    return arguments.choice(name, argument, tuple(_MEASURES))
