"""A callback that sets the learning rate of each step from a schedule."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.callbacks import steps_of_epoch
from tfscale.bridge.objects import innermost
from tfscale.callbacks import momentum, progress
from tfscale.support import arguments
from tfscale.training import schedules
from tfscale.training.schedules.schedule import EPOCHS, STEPS

LOGGED = "learning_rate"


class Warmup(keras.callbacks.Callback):
    """A callback that sets the learning rate before each step of ``fit`` by a schedule.

    If you give the same schedule to the optimizer, the training gives the same bits. But the
    callback knows the number of steps of an epoch, the number of replicas, and gradient
    accumulation. It can correct momentum. It logs the rate as ``learning_rate``: in the progress
    bar, in the history, and in TensorBoard if that callback comes later in the list.

    - **Resuming.** Only ``optimizer.iterations``, which is saved with the model, counts steps. So a
      training that resumes from a checkpoint, whole or weights only, has the rates that it would
      have had without the interruption. (``load_weights`` loads nothing into an optimizer that is
      not built yet; Keras warns of it.)
    - **Gradient accumulation.** A step is a batch; all batches of a window have the rate of the
      window's update. ``batch`` is multiplied by the window.
    - **steps_per_execution.** All steps of an execution have the rate of its first step, because
      Keras calls callbacks only then. If each step needs its own rate, give the schedule to the
      optimizer.
    - **Epochs of unknown length** (a generator) are refused if the schedule counts epochs: give
      ``fit`` ``steps_per_epoch``, or a schedule in steps. In a second ``fit`` with the same
      optimizer, an epoch has as many steps as in the first.
    - **Nothing else may set the rate.** If ``ReduceLROnPlateau`` or your code does, the next step
      raises an error. An optimizer that has its own schedule is refused.

    Args:
        schedule: a schedule of ``tfscale.schedules``, also with its epoch length or batch size left
            open, or any schedule of Keras.
        epochs: number of epochs of a warm-up that replaces ``schedule``: it ends at the rate that
            the optimizer was compiled with, which stays afterwards.
        steps: number of steps of such a warm-up.
        start: with ``epochs`` or ``steps``: the first rate.
        batch: the global batch that ``fit`` is given, for a schedule with ``base_batch``.
        batch_per_replica: replaces ``batch``; it is multiplied by the number of replicas of the
            model's strategy.
        momentum_correction: whether to multiply momentum by the new rate over the old whenever the
            rate changes, for optimizers that need it (Keras's SGD and RMSprop, LARS in its paper's
            form); others are not changed. ResNet-50 in an hour needs it. A change from a rate of 0
            is not corrected.

    Example:
        >>> import numpy as np, keras, tfscale
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.8, momentum=0.9), "mse")
        >>> x = np.zeros([40, 2])
        >>> warmup = tfscale.callbacks.Warmup(epochs=2.5)
        >>> history = model.fit(x, x, batch_size=10, epochs=3, verbose=0, callbacks=[warmup])
        >>> print(np.round(history.history["learning_rate"], 2))
        [0.24 0.56 0.8 ]

    Reference: Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour,
    sections 2.2 and 3, https://arxiv.org/abs/1706.02677.
    """

    def __init__(
        self,
        schedule: keras.optimizers.schedules.LearningRateSchedule | None = None,
        *,
        epochs: float | None = None,
        steps: float | None = None,
        start: float = 0.0,
        batch: int | None = None,
        batch_per_replica: int | None = None,
        momentum_correction: bool = False,
    ) -> None:
        super().__init__()
        expected = "a schedule, such as tfscale.schedules.Constant(0.1, warmup=500)"
        kind = keras.optimizers.schedules.LearningRateSchedule
        arguments.optional(arguments.instance, schedule, "schedule", kind, expected)
        arguments.optional(arguments.real, epochs, "epochs", 0, what="a number of epochs")
        arguments.optional(arguments.real, steps, "steps", 0, what="a number of steps")
        start = arguments.real(start, "start", 0)
        what = "a number of samples"
        arguments.optional(arguments.whole, batch, "batch", 1, what=what)
        arguments.optional(arguments.whole, batch_per_replica, "batch_per_replica", 1, what=what)
        momentum_correction = arguments.flag(momentum_correction, "momentum_correction")
        if sum(given is not None for given in (schedule, epochs, steps)) != 1:
            raise ValueError(
                "Warmup takes a schedule, or epochs, or steps: one of the three; got "
                f"schedule={schedule!r}, epochs={epochs!r}, steps={steps!r}"
            )
        if schedule is not None and start:
            raise ValueError(f"start={start!r} goes with epochs or steps; {schedule!r} has its own")
        if batch is not None and batch_per_replica is not None:
            raise ValueError(
                "batch is batch_per_replica times the number of replicas: give one of them; got "
                f"batch={batch!r}, batch_per_replica={batch_per_replica!r}"
            )
        self.schedule: Any = None  # the schedule in steps, once a training has begun
        self._definition = schedule
        self._length = (epochs or 0.0, EPOCHS) if steps is None else (steps, STEPS)
        self._start = start
        self._batch = batch
        self._batch_per_replica = batch_per_replica
        self._corrects = momentum_correction
        self._compiled = (0.0, 0)
        self._scheduled: Any = None  # the optimizer that the schedule was made for
        self._rate_of: Any = None
        self._multiply: Any = None
        self._rate: float | None = None
        self._batches = 0  # of this fit

    def set_model(self, model: Any) -> None:
        """Note the compiled rate, before a callback restores a checkpoint."""
        super().set_model(model)
        optimizer = innermost(model.optimizer)
        progress.check_settable(optimizer, "Warmup")
        rate = progress.number(optimizer.learning_rate)
        self._compiled = (rate, progress.updates(optimizer))

    def on_train_begin(self, logs: Any = None) -> None:
        """Make the schedule in steps."""
        self._rate = None
        self._batches = 0
        optimizer = innermost(self.model.optimizer)
        if self._corrects:
            momentum.buffers_with_rate(optimizer)  # raises for unknown optimizers
        if optimizer is not self._scheduled:
            self.schedule = self._closed(self._definition or self._up_to_the_compiled_rate())
            self._rate_of = tf.function(self.schedule, [tf.TensorSpec([], tf.int64)])
            self._multiply = None
            self._scheduled = optimizer

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate, once for each execution."""
        optimizer = innermost(self.model.optimizer)
        updates, window = progress.updates(optimizer), progress.window(optimizer)
        if not updates and self._batches >= window:
            self._refuse_an_optimizer_that_does_not_train(optimizer)
        self._batches += 1
        self._set(optimizer, float(self._rate_of((updates + 1) * window - 1)))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Log the rate."""
        self._log(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the rate."""
        self._refuse_an_optimizer_that_does_not_train(innermost(self.model.optimizer))
        self._log(logs)

    def _refuse_an_optimizer_that_does_not_train(self, optimizer: Any) -> None:
        trains, _ = progress.counting(self.model)
        if trains is not optimizer:
            raise RuntimeError(
                f"Warmup sets the learning rate of model.optimizer ({type(optimizer).__name__}), "
                f"which makes no updates: {self.model.name!r} trains with optimizers of its own, "
                f"such as {type(trains).__name__}. Give each of them a schedule of "
                "tfscale.schedules as learning_rate, or pass the one that trains to super().compile"
            )

    def _log(self, logs: Any) -> None:
        if logs is not None and self._rate is not None:
            logs[LOGGED] = self._rate

    def _set(self, optimizer: Any, rate: float) -> None:
        before = progress.number(optimizer.learning_rate)
        if self._rate is not None and before != self._rate:
            raise RuntimeError(
                f"Warmup has set the learning rate to {self._rate:.6g}, and now it is "
                f"{before:.6g}: something else sets it, too (another callback?). Leave one out"
            )
        if rate != before:
            optimizer.learning_rate = rate
        # rounded if the variable has half precision
        self._rate = progress.number(optimizer.learning_rate)
        if self._corrects and self._rate != before > 0:
            self._correct(optimizer, self._rate / before)

    def _correct(self, optimizer: Any, factor: float) -> None:
        buffers = momentum.buffers_with_rate(optimizer)
        if buffers and self._multiply is None:
            self._multiply = momentum.multiplication(buffers)
        if self._multiply is not None:
            self._multiply(factor)

    def _up_to_the_compiled_rate(self) -> schedules.Schedule:
        rate, updates = self._compiled
        length, unit = self._length
        if updates > 0:
            raise ValueError(
                f"the optimizer has made {updates} updates, so its learning rate, {rate:.6g}, may "
                "be from the middle of a warm-up. Say which rate the warm-up reaches: "
                f"Warmup(tfscale.schedules.Constant(RATE, warmup={length}, unit={unit!r}))"
            )
        return schedules.Constant(rate, warmup=length, start=self._start, unit=unit)

    def _closed(self, schedule: Any) -> Any:
        base_batch = getattr(schedule, "base_batch", None)
        if base_batch is not None:
            schedule = schedule.for_batch(self._samples_per_update(schedule))
        elif self._batch or self._batch_per_replica:
            raise ValueError(
                f"batch and batch_per_replica scale a rate, and {schedule!r} does not say for "
                "which batch its rate is. Give it base_batch=..., or leave them out here"
            )
        return progress.in_steps(schedule, steps_of_epoch(self), "Warmup")

    def _samples_per_update(self, schedule: schedules.Schedule) -> int:
        if self._batch is not None:
            batch = self._batch
        elif self._batch_per_replica is not None:
            batch = self._batch_per_replica * self.model.distribute_strategy.num_replicas_in_sync
        else:
            raise ValueError(
                f"{schedule!r} is for batches of {schedule.base_batch}, and fit doesn't tell "
                "callbacks its batch size. Give Warmup batch=..., the global batch, or "
                "batch_per_replica=..."
            )
        return batch * progress.window(self.model.optimizer)
