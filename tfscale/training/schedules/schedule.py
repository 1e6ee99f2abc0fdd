"""The base class of schedules: a warm-up, a unit of time, and a batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfscale.support import arguments
from tfscale.training.schedules.plot import draw
from tfscale.training.schedules.scaling import RULES, checked_batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS = 2001  # points of a plot

STEPS, EPOCHS = UNITS = ("steps", "epochs")

Self = TypeVar("Self", bound="Schedule")


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    r"""A gradual warm-up, followed by the curve of a subclass.

    .. math::
        \eta(t) = \begin{cases}
            \eta_s + (\eta - \eta_s) \, t / w & t < w \\
            \text{the subclass's curve} & t \ge w
        \end{cases}

    with the rate :math:`\eta`, the warm-up's length :math:`w` and its first rate :math:`\eta_s`.
    Time counts from 0 at the first batch that ``fit`` trains on. A step is a batch, not an update,
    even with ``gradient_accumulation_steps``, since Keras passes the number of batches to
    schedules.

    You may leave two things open when you define a schedule: the number of steps of an epoch
    (``unit="epochs"``), and the batch size (``base_batch``). ``in_steps`` and ``for_batch`` set
    them, and ``tfscale.callbacks.Warmup`` calls both. With both set, the result is a Keras
    schedule: for any optimizer, in graphs and under XLA, saved with the model.

    Args:
        rate: :math:`\eta`, the rate at the end of the warm-up.
        warmup: :math:`w`, in steps or epochs; fractions are fine.
        start: :math:`\eta_s`, the rate of the first step. If it is above ``rate``, ``rate`` is
            used instead.
        unit: the unit of times, ``"steps"`` or ``"epochs"``.
        base_batch: the batch size that ``rate`` is meant for; None if ``rate`` needs no scaling.
        scaling: how the rate changes with the batch size: ``"linear"`` or ``"square root"``.
    """

    TIMES: ClassVar[tuple[str, ...]] = ("warmup",)
    RATES: ClassVar[tuple[str, ...]] = ("rate",)

    def __init__(
        self,
        rate: float,
        *,
        warmup: float = 0,
        start: float = 0.0,
        unit: str = STEPS,
        base_batch: int | None = None,
        scaling: str = "linear",
    ) -> None:
        self.rate = arguments.real(rate, "rate", above=0)
        self.warmup = arguments.real(warmup, "warmup", 0)
        self.start = arguments.real(start, "start", 0)
        self.unit = arguments.choice(unit, "unit", UNITS)
        self.base_batch = arguments.optional(checked_batch, base_batch, "base_batch")
        self.scaling = arguments.choice(scaling, "scaling", tuple(RULES))

    def __call__(self, step: Any) -> Any:
        """Return the rate of a step, or of a tensor of steps, as float32."""
        if self.base_batch is not None:
            raise ValueError(
                f"{self!r} is for batches of {self.base_batch}, and the size of your batches "
                "is not known. Give the optimizer schedule.for_batch(batch), or give "
                "tfscale.callbacks.Warmup(schedule, batch=...)"
            )
        if self.unit == EPOCHS:
            raise ValueError(
                f"{self!r} counts epochs, and the number of steps in an epoch is not known. "
                "Give the optimizer schedule.in_steps(steps_per_epoch), or use "
                "tfscale.callbacks.Warmup(schedule), which knows it from fit"
            )
        return tf.cast(self.at_time(step), tf.float32)

    def at_time(self, time: Any) -> Any:
        """Return the rate at a time in the schedule's own unit, as float64."""
        time = tf.cast(time, tf.float64)
        after = self._after_warmup(time)
        if not self.warmup:
            return after
        start = min(self.start, self.rate)
        during = start + (self.rate - start) * (time / self.warmup)
        return tf.where(time < self.warmup, during, after)

    def _after_warmup(self, time: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define its curve")

    @property
    def horizon(self) -> float:
        """A time at which a plot of the schedule can end."""
        raise NotImplementedError(f"{type(self).__name__} must define where a picture of it ends")

    def in_steps(self: Self, steps_per_epoch: float) -> Self:
        """Return this schedule with its times in steps; itself, if they already are."""
        if self.unit == STEPS:
            return self
        arguments.real(steps_per_epoch, "steps_per_epoch", above=0)
        config = self.get_config()
        times = {name: _times(config[name], steps_per_epoch) for name in self.TIMES}
        return type(self)(**{**config, **times, "unit": STEPS})

    def for_batch(self: Self, batch: int) -> Self:
        """Return this schedule with rates for a batch size; itself, if it has no ``base_batch``.

        Args:
            batch: number of samples of an update: the global batch, times
                ``gradient_accumulation_steps``.
        """
        if self.base_batch is None:
            return self
        rule = RULES[self.scaling]
        config = self.get_config()
        rates = {name: rule(config[name], self.base_batch, batch) for name in self.RATES}
        return type(self)(**{**config, **rates, "base_batch": None})

    def plot(self, until: float | None = None) -> Figure:
        """Draw the rate over time; needs matplotlib (``pip install matplotlib``).

        Args:
            until: end of the plot, in the schedule's unit; by default a time that suits its curve.
        """
        arguments.optional(arguments.real, until, "until", above=0)
        times = np.linspace(0.0, self.horizon if until is None else until, _POINTS)
        batch = "" if self.base_batch is None else f" for a batch of {self.base_batch}"
        return draw(
            times,
            self.at_time(times).numpy(),
            title=type(self).__name__,
            warmup=self.warmup,
            unit=self.unit,
            what=f"learning rate{batch}",
        )

    def get_config(self) -> dict[str, Any]:
        """Return all arguments, in types that JSON knows."""
        return {
            "rate": self.rate,
            "warmup": self.warmup,
            "start": self.start,
            "unit": self.unit,
            "base_batch": self.base_batch,
            "scaling": self.scaling,
        }

    def __repr__(self) -> str:
        told = [f"{name}={value!r}" for name, value in self.get_config().items()]
        return f"{type(self).__name__}({', '.join(told)})"


def _times(value: Any, factor: float) -> Any:
    if value is None:
        return None
    return [one * factor for one in value] if isinstance(value, list) else value * factor
