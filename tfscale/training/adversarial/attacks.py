"""Attacks: the steps that move samples to raise the loss, and the largest distance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.support import arguments

Tensors = list[Any]

_MOST_STEPS = 10_000  # each step is part of the graph


@dataclasses.dataclass(frozen=True)
class PGD:
    r"""Projected gradient descent: several steps uphill, each followed by a projection.

    No number of a sample moves by more than :math:`\epsilon`:

    .. math::
        x_{t+1} = \Pi_{|x - x_0| \le \epsilon} \bigl( x_t + \alpha \,
        \mathrm{sign} \nabla_x L(x_t, y) \bigr)

    A gradient that is not finite (fp16 overflows) moves nothing.

    Args:
        epsilon: largest change of a number, in the units of the data.
        steps: number of steps. Each is a forward and a backward pass.
        step_size: :math:`\alpha`; by default 2.5 epsilon / steps.
        random_start: whether to begin at a random place within epsilon, not at the sample.
        low: the smallest possible number in the data, if there is one.
        high: the largest possible number in the data, if there is one.

    Example:
        >>> attack = tfscale.adversarial.PGD(0.1, steps=5, low=0.0, high=1.0)
        >>> attack.step_size
        0.05

    Reference: Madry, Makelov, Schmidt, Tsipras, Vladu, Towards Deep Learning Models Resistant to
    Adversarial Attacks, https://arxiv.org/abs/1706.06083.
    """

    epsilon: float
    steps: int = 10
    step_size: float | None = None
    random_start: bool = True
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        units = "a number in the data's units"
        arguments.real(self.epsilon, "epsilon", above=0, what=units)
        arguments.whole(self.steps, "steps", 1, _MOST_STEPS)
        if self.step_size is None:
            object.__setattr__(self, "step_size", 2.5 * self.epsilon / self.steps)
        arguments.real(self.step_size, "step_size", above=0, what=units)
        arguments.flag(self.random_start, "random_start")
        for name in ("low", "high"):
            arguments.optional(arguments.real, getattr(self, name), name, what=units)
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low must be below high; got low={self.low!r}, high={self.high!r}")

    def perturb(
        self,
        inputs: Tensors,
        gradients: Callable[[Tensors], Tensors],
        draws: Callable[[], Tensors],
        strength: Any = 1.0,
    ) -> Tensors:
        """Return the samples after the attack.

        Args:
            inputs: floating-point tensors whose first dimension is the batch.
            gradients: returns the gradients of the loss by tensors that replace the inputs.
            draws: returns random numbers from -1 to 1 in the inputs' shapes; called for a random
                start.
            strength: factor of epsilon and of the step size.
        """
        moved = inputs
        if self.random_start:
            far = [_times(self.epsilon * strength, draw) for draw in draws()]
            moved = self._clipped(
                inputs, [x + d for x, d in zip(inputs, far, strict=True)], strength
            )
        for _ in range(self.steps):
            steps = [_times(self.step_size * strength, _sign(g)) for g in gradients(moved)]
            moved = self._clipped(
                inputs, [x + step for x, step in zip(moved, steps, strict=True)], strength
            )
        return moved

    def _clipped(self, inputs: Tensors, moved: Tensors, strength: Any) -> Tensors:
        """Clip numbers to the allowed distance from their input, and to the data's range."""
        found = []
        for x, other in zip(inputs, moved, strict=True):
            reach = tf.cast(self.epsilon * strength, x.dtype)
            other = tf.clip_by_value(other, x - reach, x + reach)
            if self.low is not None:
                other = tf.maximum(other, tf.cast(self.low, x.dtype))
            if self.high is not None:
                other = tf.minimum(other, tf.cast(self.high, x.dtype))
            found.append(other)
        return found


class FGSM(PGD):
    r"""The fast gradient sign method: one step of the largest allowed length.

    .. math:: x' = x + \epsilon \, \mathrm{sign} \nabla_x L(x, y)

    Args:
        epsilon: change of a number, in the units of the data.
        low: the smallest possible number in the data, if there is one.
        high: the largest possible number in the data, if there is one.

    Example:
        >>> tfscale.adversarial.FGSM(0.1, low=0.0, high=1.0)
        FGSM(epsilon=0.1, steps=1, step_size=0.1, random_start=False, low=0.0, high=1.0)

    Reference: Goodfellow, Shlens, Szegedy, Explaining and Harnessing Adversarial Examples,
    https://arxiv.org/abs/1412.6572.
    """

    def __init__(
        self, epsilon: float, *, low: float | None = None, high: float | None = None
    ) -> None:
        super().__init__(epsilon, 1, epsilon, random_start=False, low=low, high=high)


def checked_attack(attack: PGD) -> PGD:
    """Return an attack, or raise."""
    expected = "one of tfscale.adversarial, such as FGSM(0.05, low=0.0, high=1.0)"
    return arguments.instance(attack, "attack", PGD, expected)


def _sign(gradient: Any) -> Any:
    return tf.sign(tf.where(tf.math.is_finite(gradient), gradient, tf.zeros_like(gradient)))


def _times(factor: Any, x: Any) -> Any:
    return tf.cast(factor, x.dtype) * x
