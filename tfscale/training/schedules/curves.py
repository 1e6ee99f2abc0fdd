"""The curves of schedules after the warm-up, one class for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.support import arguments
from tfscale.training.schedules.schedule import Schedule

registered = keras.saving.register_keras_serializable(package="tfscale")


@registered
class Constant(Schedule):
    r"""A constant rate after the warm-up.

    .. math:: \eta(t) = \eta

    Args:
        rate: :math:`\eta`.
        general: ``warmup``, ``start``, ``unit``, ``base_batch`` and ``scaling`` of ``Schedule``.

    Example:
        >>> print(float(Constant(0.4, warmup=10)(5)))
        0.20000000298023224
    """

    def _after_warmup(self, time: Any) -> Any:
        return tf.ones_like(time) * self.rate

    @property
    def horizon(self) -> float:
        """Twice the warm-up."""
        return 2 * self.warmup or 1.0


@registered
class Drops(Schedule):
    r"""A rate that drops by a factor at each of several times.

    .. math:: \eta(t) = \eta \, f^{\,|\{a : a \le t\}|}

    Args:
        rate: :math:`\eta`.
        at: the times :math:`a`, counted from the beginning of the training, in ascending order,
            none in the warm-up.
        factor: :math:`f`.
        general: ``warmup``, ``start``, ``unit``, ``base_batch`` and ``scaling`` of ``Schedule``.

    Example:
        ResNet-50 in an hour: 0.1 for a batch of 256, 5 epochs of warm-up from there, a tenth at
        the epochs 30, 60 and 80 of 90.

        >>> schedule = Drops(
        ...     0.1, at=[30, 60, 80], start=0.1, warmup=5, unit="epochs", base_batch=256
        ... )
        >>> rate = schedule.for_batch(8192).in_steps(steps_per_epoch=156)
        >>> print([round(float(rate(156 * epoch)), 4) for epoch in (0, 5, 30, 60, 80)])
        [0.1, 3.2, 0.32, 0.032, 0.0032]

    Reference: Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour,
    sections 2.2 and 5.1, https://arxiv.org/abs/1706.02677.
    """

    TIMES = ("warmup", "at")

    def __init__(
        self, rate: float, at: Sequence[float], factor: float = 0.1, **general: Any
    ) -> None:
        super().__init__(rate, **general)
        expected = f"a list of increasing times, none before warmup={self.warmup}"
        self.at: list[float] = list(arguments.items(at, "at", expected, arguments.real))
        self.factor = arguments.real(factor, "factor", above=0)
        if self.at != sorted(set(self.at)) or self.at[0] < self.warmup:
            raise arguments.wrong(at, "at", expected)

    def _after_warmup(self, time: Any) -> Any:
        passed = tf.add_n([tf.cast(time >= drop, tf.float64) for drop in self.at])
        return self.rate * tf.pow(tf.constant(self.factor, tf.float64), passed)

    @property
    def horizon(self) -> float:
        """A time slightly after the last drop."""
        return 1.125 * self.at[-1]

    def get_config(self) -> dict[str, Any]:
        """Return all arguments, in types that JSON knows."""
        return {**super().get_config(), "at": self.at, "factor": self.factor}


class _Decay(Schedule):
    """A decay from the rate to a final one, between two times."""

    TIMES = ("warmup", "end", "begin")
    RATES = ("rate", "final")

    def __init__(
        self,
        rate: float,
        end: float,
        *,
        begin: float | None = None,
        final: float = 0.0,
        **general: Any,
    ) -> None:
        super().__init__(rate, **general)
        self.end = arguments.real(end, "end", 0)
        self.begin = arguments.optional(arguments.real, begin, "begin", 0)
        self.final = arguments.real(final, "final", 0)
        if not (self._first < self.end and self.warmup <= self.end):
            raise ValueError(
                "a decay must end after its begin and after the warm-up; got "
                f"begin={self._first}, warmup={self.warmup}, end={end}"
            )

    @property
    def _first(self) -> float:
        return self.warmup if self.begin is None else self.begin

    def _left(self, time: Any) -> Any:
        """Return the remaining share of the decay, from 1 to 0."""
        left = (self.end - time) / (self.end - self._first)
        return tf.clip_by_value(left, 0.0, 1.0)

    def _between(self, share: Any) -> Any:
        return self.final + (self.rate - self.final) * share

    @property
    def horizon(self) -> float:
        """The end of the decay."""
        return self.end

    def get_config(self) -> dict[str, Any]:
        """Return all arguments, in types that JSON knows."""
        mine = {"end": self.end, "begin": self.begin, "final": self.final}
        return {**super().get_config(), **mine}


@registered
class Polynomial(_Decay):
    r"""A decay by a power of the remaining time: power 1 for LAMB, 2 for LARS.

    .. math:: \eta(t) = \eta_f + (\eta - \eta_f) \left(\frac{e - t}{e - b}\right)^p

    and :math:`\eta_f` from :math:`e` on.

    Args:
        rate: :math:`\eta`.
        end: :math:`e`, counted from the beginning of the training.
        power: :math:`p`.
        begin: :math:`b`; by default the end of the warm-up. 0 as in BERT's code: the decay also
            runs during the warm-up, so the rate drops when the warm-up ends.
        final: :math:`\eta_f`; the scaling rule changes it like ``rate``.
        general: ``warmup``, ``start``, ``unit``, ``base_batch`` and ``scaling`` of ``Schedule``.

    Example:
        >>> schedule = Polynomial(32.0, end=90, power=2, warmup=14, unit="epochs")
        >>> print(float(schedule.in_steps(39)(39 * 52)))
        8.0

    Reference: You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks,
    https://arxiv.org/abs/1708.03888; You et al., Large Batch Optimization for Deep Learning:
    Training BERT in 76 minutes, https://arxiv.org/abs/1904.00962.
    """

    def __init__(self, rate: float, end: float, power: float = 1.0, **general: Any) -> None:
        super().__init__(rate, end, **general)
        self.power = arguments.real(power, "power", above=0)

    def _after_warmup(self, time: Any) -> Any:
        return self._between(tf.pow(self._left(time), tf.constant(self.power, tf.float64)))

    def get_config(self) -> dict[str, Any]:
        """Return all arguments, in types that JSON knows."""
        return {**super().get_config(), "power": self.power}


@registered
class Cosine(_Decay):
    r"""A decay along half a cosine wave.

    .. math::
        \eta(t) = \eta_f + (\eta - \eta_f) \, \tfrac{1}{2}
            \left(1 + \cos \pi \tfrac{t - b}{e - b}\right)

    and :math:`\eta_f` from :math:`e` on.

    Args:
        rate: :math:`\eta`.
        end: :math:`e`, counted from the beginning of the training.
        begin: :math:`b`; by default the end of the warm-up.
        final: :math:`\eta_f`; the scaling rule changes it like ``rate``.
        general: ``warmup``, ``start``, ``unit``, ``base_batch`` and ``scaling`` of ``Schedule``.

    Example:
        >>> print(float(Cosine(0.5, end=100)(50)))
        0.25

    Reference: Loshchilov, Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts
    (without the restarts), https://arxiv.org/abs/1608.03983.
    """

    def _after_warmup(self, time: Any) -> Any:
        return self._between((1 - tf.cos(math.pi * self._left(time))) / 2)


@registered
class InverseSquareRoot(Schedule):
    r"""A rate that falls with the square root of the time.

    .. math:: \eta(t) = \eta \sqrt{w / t}

    with the warm-up's length :math:`w`, which is required.

    Args:
        rate: :math:`\eta`; in the Transformer's paper :math:`(d w)^{-1/2}` for width :math:`d`.
        general: ``warmup``, ``start``, ``unit``, ``base_batch`` and ``scaling`` of ``Schedule``.

    Example:
        >>> print(float(InverseSquareRoot(0.5, warmup=100)(400)))
        0.25

    Reference: Vaswani et al., Attention Is All You Need, section 5.3,
    https://arxiv.org/abs/1706.03762. Steps count from 1 there, and from 0 here.
    """

    def __init__(self, rate: float, **general: Any) -> None:
        super().__init__(rate, **general)
        arguments.real(self.warmup, "warmup", above=0, what="a number, for this schedule")

    def _after_warmup(self, time: Any) -> Any:
        return self.rate * tf.sqrt(self.warmup / tf.maximum(time, self.warmup))

    @property
    def horizon(self) -> float:
        """The time at which the rate has fallen to a third."""
        return 9 * self.warmup
