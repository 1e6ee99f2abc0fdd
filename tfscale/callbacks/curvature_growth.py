"""A callback that grows batches as the loss becomes flatter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfscale.analysis import curvature
from tfscale.analysis.curvature.of_model import refuse_other_strategies
from tfscale.bridge import fit
from tfscale.bridge.callbacks import steps_of_epoch
from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.objects import innermost
from tfscale.callbacks import progress
from tfscale.callbacks.growing_batches import GrowingBatches
from tfscale.callbacks.warmup import Warmup
from tfscale.support import arguments, records

KIND = "growth by curvature"


@dataclasses.dataclass(frozen=True)
class Measure:
    """A measurement before an epoch, and the decisions that follow from it.

    Attributes:
        epoch: the epoch that begins.
        step: the step that begins, as the optimizer counts.
        eigenvalue: the largest eigenvalue; 0 if it is negative.
        reference: the eigenvalue that later ones are compared with.
        grown: the epoch in which the batch grew last; 0 if it never grew.
        size: the batch size from this step on.
        rate: the learning rate from this step on.
    """

    epoch: int
    step: int
    eigenvalue: float
    reference: float
    grown: int
    size: int
    rate: float

    @classmethod
    def of(cls, record: records.Record) -> Measure:
        """Read a saved measurement."""
        counts = {name: record.integer(name) for name in ("epoch", "step", "grown", "size")}
        numbers = {name: record.number(name) for name in ("eigenvalue", "reference", "rate")}
        return cls(**counts, **numbers)  # type: ignore[arg-type]


class CurvatureGrowth(GrowingBatches):
    """The callback that ``BatchGrowth.by_curvature`` makes and documents."""

    def __init__(
        self,
        batch: int,
        largest: int,
        samples: int,
        data: tuple[Any, Any, Any],
        *,
        batch_size: int | None,
        factor: int,
        fall: float,
        patience: int,
        raise_rate: bool,
        file: str | Path | None,
    ) -> None:
        if KERAS_2:
            raise ValueError(
                f"BatchGrowth.by_curvature measures models of Keras 3, and this is Keras "
                f"{keras.__version__}. BatchGrowth itself works here"
            )
        for name, each in zip(("x", "y", "sample_weight"), data, strict=True):
            if name == "x" or each is not None:
                arguments.data(each, name)
        self.batch = arguments.whole(batch, "batch", 1, what="a batch size")
        super().__init__({0: self.batch})
        self.largest = arguments.whole(largest, "largest", self.batch, what="the last batch size")
        factor = arguments.whole(factor, "factor", 2)
        fall = arguments.real(fall, "fall", 1)
        patience = arguments.whole(patience, "patience", 1, what="a number of epochs")
        samples = arguments.whole(samples, "samples", 1, what="the number of samples of a pass")
        arguments.optional(arguments.whole, batch_size, "batch_size", 1, what="a number of rows")
        arguments.flag(raise_rate, "raise_rate")
        arguments.optional(arguments.path, file, "file")
        self.measures: list[Measure] = []
        self._samples = samples
        self._data, self._batch_size = data, batch_size
        self._factor, self._fall, self._patience = factor, fall, patience
        self._raises = raise_rate
        self._file = None if file is None else Path(file)
        self._hessian: Any = None
        self._epoch = 0
        self._begun = False
        self._rate = 0.0

    def share(self, first: float, epochs: int | None = None) -> Callable[[int], float]:
        """Return the share of adversarial samples as a function of the step, for ``Adversarial``.

        The share falls as the batch grows, and is 0 at the largest batch.

        Args:
            first: share with the first batch.
            epochs: number of epochs after which the share is 0 in any case.
        """
        first = arguments.real(first, "first", 0, 1)
        arguments.optional(arguments.whole, epochs, "epochs", 0, what="a number of epochs")

        def share(step: int) -> float:
            size = self.size(step)
            over = epochs is not None and self._epoch >= epochs
            return 0.0 if over or size >= self.largest else first * self.batch / size

        return share

    def steps(self, samples: int) -> int:
        """Raise: the number of steps is unknown before the training."""
        raise ValueError(
            "the number of steps depends on when batches grow, which is unknown before the "
            "training; afterwards the optimizer's iterations have it"
        )

    def _from(self, samples: tf.data.Dataset, begin: Any) -> tf.data.Dataset:
        size = tf.ensure_shape(tf.numpy_function(self.size, [begin], tf.int64), [])
        return samples.repeat().batch(size, drop_remainder=True)

    # ------------------------------------------------------------------ Keras

    def on_train_begin(self, logs: Any = None) -> None:
        """Check the settings of ``fit``. A checkpoint may be restored after this."""
        steps = steps_of_epoch(self)
        if steps is not None:
            raise ValueError(
                "an epoch of BatchGrowth.by_curvature is a pass over the data, of fewer steps as "
                f"batches grow, and fit was given steps_per_epoch={steps}: leave it "
                "out"
            )
        self._check_sizes([self.batch, self.largest])
        self._check_conflicts()
        self._read = self._begun = False
        self._hessian = None

    def _check_conflicts(self) -> None:
        """Refuse strategies, optimizers and callbacks that conflict with this callback."""
        refuse_other_strategies(self.model, "BatchGrowth.by_curvature")
        others = fit.callbacks_of_fit()
        if self._raises:
            progress.check_settable(innermost(self.model.optimizer), "BatchGrowth.by_curvature")
            if any(isinstance(other, Warmup) for other in others):
                raise ValueError(
                    "Warmup and BatchGrowth.by_curvature both set the learning rate. Leave out "
                    "Warmup, or let the rate stay as Warmup sets it: raise_rate=False"
                )
        backs_up = any(isinstance(other, keras.callbacks.BackupAndRestore) for other in others)
        if backs_up and self._file is None:
            raise ValueError(
                "a backup does not record when batches have grown. Give BatchGrowth.by_curvature "
                'file="growth.json", which it reads when the training goes on'
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Resume or measure: after a checkpoint was restored, before the data is read."""
        step, before, anew = self._steps_made(), self._first, not self._begun
        if anew:
            self._resume(step)
            self._begun = True
        self._epoch = epoch
        size = self.size(step)
        known = self.measures and self.measures[-1].step == step
        if step > 0 and size < self.largest and not known:
            self._measure(epoch, step)
        self._first = step
        if anew or self.size(step) != self.size(before):
            fit.read_anew(math.ceil(self._samples / self.size(step)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the batch size and the eigenvalue."""
        super().on_epoch_end(epoch, logs)
        if logs is not None:  # CSVLogger takes its columns from the first epoch
            logs["curvature_top"] = self.measures[-1].eigenvalue if self.measures else math.nan

    # ------------------------------------------------------------------- the rule

    def _measure(self, epoch: int, step: int) -> None:
        if self._hessian is None:
            self._hessian = curvature.Hessian(self.model, *self._data, batch_size=self._batch_size)
        try:
            eigenvalue = max(0.0, float(self._hessian.eigenvalues(top=1).top[0]))
        except curvature.NotFiniteError as error:
            raise curvature.NotFiniteError(
                f"BatchGrowth.by_curvature measured before epoch {epoch + 1}: {error}. If the data "
                "are finite, train with a lower learning rate"
            ) from error
        last = self.measures[-1] if self.measures else None
        reference = last.reference if last else eigenvalue
        grown = last.grown if last else 0
        fallen = last is not None and eigenvalue <= reference / self._fall
        size, rate = self.size(step), self._current_rate()
        if fallen or epoch - grown >= self._patience:
            larger = min(size * self._factor, self.largest)
            rate = self._set_rate(rate * larger / size) if self._raises else rate
            size, grown = larger, epoch
            reference = eigenvalue if fallen else reference
        self._take(Measure(epoch, step, eigenvalue, reference, grown, size, rate))
        self._save()

    def _take(self, measure: Measure) -> None:
        self.measures.append(measure)
        if measure.size != self.size(measure.step):
            self.sizes[measure.step] = measure.size

    def _current_rate(self) -> float:
        rate = progress.number(innermost(self.model.optimizer).learning_rate)
        if self._raises and rate != self._rate:
            raise RuntimeError(
                f"BatchGrowth.by_curvature has left the learning rate at {self._rate:.6g}, and now "
                f"it is {rate:.6g}: something else sets it, too (another callback?). Leave one "
                "out, or pass raise_rate=False, so that only the batch grows"
            )
        return rate

    def _set_rate(self, rate: float) -> float:
        optimizer = innermost(self.model.optimizer)
        optimizer.learning_rate = rate
        self._rate = progress.number(optimizer.learning_rate)  # rounded to the variable's type
        return self._rate

    # -------------------------------------------------------------------- resuming

    def _resume(self, step: int) -> None:
        """Restore the decisions up to a step."""
        measures = self.measures or self._saved()
        if step > 0 and not self.measures and not self._has_file():
            raise ValueError(
                f"the optimizer has made {step} steps, and how batches grew in them is "
                f"unknown: {self._file or 'file=...'} is missing. Give BatchGrowth.by_curvature "
                "the file of that training, or compile the model anew"
            )
        self.measures, self.sizes = [], {0: self.batch}
        for measure in measures:
            if 0 < measure.step <= step:
                self._take(measure)
        self._rate = progress.number(innermost(self.model.optimizer).learning_rate)
        if self._raises and self.measures:
            self._set_rate(self.measures[-1].rate)
        self._save()

    def _has_file(self) -> bool:
        return self._file is not None and self._file.exists()

    def _saved(self) -> list[Measure]:
        if self._file is None or not self._has_file():
            return []
        record = records.Record.read(self._file)
        if record.text("kind") != KIND:
            raise record.wrong("kind", repr(KIND))
        for name, own in self._settings().items():
            if record.number(name) != own:
                raise record.wrong(name, f"{own}, as in this training")
        return [Measure.of(each) for each in record.records("measures")]

    def _settings(self) -> dict[str, float]:
        return {"batch": self.batch, "largest": self.largest, "factor": self._factor}

    def _save(self) -> None:
        if self._file is not None:
            measures = [dataclasses.asdict(measure) for measure in self.measures]
            records.write(self._file, {"kind": KIND, **self._settings(), "measures": measures})
