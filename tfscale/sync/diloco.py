"""Replicas train alone, and then an outer optimizer goes where they have gone on average."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

from tfscale.compression.method import Method
from tfscale.compression.policy import MethodPolicy, WirePolicy
from tfscale.sync.period import Period, checked_period
from tfscale.sync.rule import Round, Rule
from tfscale.wires import LOSSLESS

OUTER = "outer"


@dataclasses.dataclass(frozen=True, repr=False)
class DiLoCo(Rule):
    r"""DiLoCo: an outer optimizer, for which the way of a round is a gradient.

    All P replicas begin a round with the same outer weights W, and make H steps of the model's
    own (inner) optimizer, alone. The outer optimizer then updates W by the outer gradient

    .. math:: \frac{1}{P} \sum_r (W - w_r),

    and all replicas go on from the new W. What the inner optimizer keeps stays each replica's own.

    Args:
        every: H; or a ``Period``.
        outer: a function that makes an optimizer of Keras; or an optimizer, from whose settings
            the strategy makes one of its own; by default ``SGD(0.7, momentum=0.9,
            nesterov=True)``. With several workers pass a function: an optimizer makes variables,
            and TensorFlow lets workers meet only before the first variable.
        wire: the format in which differences are sent, as ``ScaleStrategy`` takes it.
        method: instead of ``wire``, how they become sums.
        error_feedback: whether what rounding on ``wire`` loses in one round is added to the
            differences of the next; by default it is.

    Example:
        >>> strategy = tfscale.ScaleStrategy(sync=tfscale.sync.DiLoCo(every=100, wire="int8"))

    Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
    Models", 2023.
    """

    every: int | Period = 100
    outer: Any = None
    wire: str | Mapping[str, str] | WirePolicy | None = None
    method: Method | Mapping[str, Method | str] | MethodPolicy | None = None
    error_feedback: bool | None = None

    keeps = kept_weights = (OUTER,)
    has_outer = True

    def __post_init__(self) -> None:
        checked_period(self.every)
        if not (self.outer is None or callable(self.outer) or _is_optimizer(self.outer)):
            raise ValueError(
                "outer is an optimizer of Keras, or a function that makes one, such as lambda: "
                f"keras.optimizers.SGD(1.0); got {self.outer!r}"
            )
        if self.method is not None and (self.wire, self.error_feedback) != (None, None):
            raise ValueError(
                f"method={self.method!r} says how differences are sent, and wire={self.wire!r} or "
                f"error_feedback={self.error_feedback!r} says so, too. Leave one of them out"
            )
        object.__setattr__(self, "_policy", self._chosen())  # what is wrong is refused now

    def make_outer(self) -> Any:
        """The outer optimizer."""
        if self.outer is None:
            return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True, name="outer")
        if _is_optimizer(self.outer):
            return type(self.outer).from_config(self.outer.get_config())
        made = self.outer()
        if not _is_optimizer(made):
            raise ValueError(f"outer is to make an optimizer of Keras, and made {made!r}")
        return made

    def describe(self) -> str:
        """All settings, the outer optimizer's too."""
        outer = self.make_outer()
        settings = {key: value for key, value in outer.get_config().items() if key != "name"}
        return f"every={self.every!r}, {type(outer).__name__} {settings}, {self.policy!r}"

    def _chosen(self) -> MethodPolicy:
        if self.method is not None:
            return MethodPolicy.of(self.method)
        feedback = True if self.error_feedback is None else self.error_feedback
        return WirePolicy.of(self.wire or LOSSLESS).methods(feedback)

    @property
    def policy(self) -> MethodPolicy:
        """By which methods differences are sent."""
        return self._policy  # type: ignore[attr-defined, no-any-return]

    def begin(self, round: Round) -> None:
        """Keep the outer weights."""
        round.keep(OUTER, [weight.read_value() for weight in round.weights])

    def end(self, round: Round) -> None:
        """Step with the outer optimizer, from the round's beginning."""
        began = round.kept(OUTER)
        ways = [start - w.read_value() for start, w in zip(began, round.weights, strict=True)]
        means = round.mean(ways)
        for weight, start in zip(round.weights, began, strict=True):
            weight.assign(start)
        round.outer_step(means)


def _is_optimizer(thing: Any) -> bool:
    return isinstance(thing, keras.optimizers.Optimizer)
