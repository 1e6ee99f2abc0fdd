r"""Stages: a first method, usually full precision, and then another one.

At the beginning of a training gradients change fast, and optimizers that divide by a running mean
of their squares, such as Adam and LAMB, have no good estimate of it yet. Compression errors do most
harm then. The size of the mean shows whether it has settled: with the sums :math:`S_t`,

.. math:: v_t = \beta v_{t-1} + (1 - \beta) \lVert S_t \rVert^2

is the 1-norm of the running mean of squares, up to its bias. The mean has settled when it is nearly
the same as :math:`1 / (1 - \beta)` steps before.

References: Tang et al.: 1-bit Adam (ICML 2021), arXiv 2102.02888; Li et al.: 1-bit LAMB (HiPC
2022), arXiv 2104.06069.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfscale.collectives.wires import LOSSLESS
from tfscale.compression.gradient import Gradient
from tfscale.compression.method import Kept, Load, Method
from tfscale.compression.switching import Switching, method_of, methods_of, switched
from tfscale.support import arguments

_SETTLING = "settling"  # steps, mean of squares, mean at the last check, whether settled
_STEPS, _MEAN, _BEFORE, _SETTLED = range(4)
_LARGEST = 1e30


@dataclasses.dataclass(frozen=True)
class Settled:
    """The criterion of 1-bit Adam: the variance of the gradients has settled.

    Each ``over`` steps, the running mean of squares is compared with its value at the last check.
    Each bucket of gradients settles separately, on all replicas at the same step.

    Args:
        ratio: the mean has settled if the smaller value is at least this share of the larger one.
        over: number of steps that the mean covers; for Adam's ``beta_2`` that is ``1 / (1 -
            beta_2)``.
        after: smallest number of the optimizer's updates, such as those of a warm-up of the
            learning rate.

    Example:
        >>> method = Staged("fp32", "sign", when=Settled(over=100))
    """

    ratio: float = 0.96
    over: int = 1000
    after: int = 0

    def __post_init__(self) -> None:
        arguments.real(self.ratio, "ratio", above=0, most=1)
        arguments.whole(self.over, "over", 1, what="a number of steps")
        arguments.whole(self.after, "after", 0, what="a number of steps")

    def __str__(self) -> str:
        return f"until variances have settled (ratio {self.ratio:g} over {self.over} steps)"


@dataclasses.dataclass(frozen=True)
class Staged(Switching):
    """A method that uses one method first, and then another one.

    ``then`` sends what ``first`` has not sent yet. The stage depends on the number of the
    optimizer's updates, so a restored training continues in the right stage. With gradient
    accumulation, a window is one update.

    Args:
        first: a method or a wire's name, such as ``"fp32"``.
        then: a method or a wire's name, for the rest of the training.
        when: number of updates with ``first``; or ``Settled(...)``. Three epochs are ``3 *
            math.ceil(samples / batch_size)``.

    Example:
        >>> strategy = tfscale.ScaleStrategy(method=Staged("fp32", "sign", when=1000))
    """

    first: Method | str
    then: Method | str
    when: int | Settled = Settled()

    def __post_init__(self) -> None:
        for name in ("first", "then"):
            object.__setattr__(self, name, method_of(getattr(self, name), name))
        if not isinstance(self.when, Settled):
            what = (
                "Settled(...), or a number of steps (three epochs are "
                "3 * math.ceil(samples / batch_size) steps)"
            )
            arguments.whole(self.when, "when", 0, what=what)

    @property
    def variants(self) -> tuple[Method, ...]:  # type: ignore[override]
        """The first method, and the one that follows."""
        return methods_of([self.first, self.then], "Staged")

    @property
    def others(self) -> tuple[Method, ...]:  # type: ignore[override]
        """Stages of the methods that its methods leave gradients to."""
        first, then = ([each, *each.others] for each in self.variants)
        pairs = itertools.product(first, then)
        return tuple(dict.fromkeys(self._stages(*pair) for pair in [*pairs][1:]))

    @property
    def rows_wire(self) -> str:
        """The wire of rows of tables, which have no stages."""
        return self.variants[0].rows_wire

    def suited(self, gradient: Gradient) -> Method:
        """Return stages of the methods that suit a gradient; a single method if they are equal."""
        return self._stages(*(each.suited(gradient) for each in self.variants))

    def _stages(self, first: Method, then: Method) -> Method:
        return first if first == then else dataclasses.replace(self, first=first, then=then)

    def state(self, gradient: Gradient) -> Mapping[str, Kept]:
        """Return the state of both methods, and of the settling."""
        state = super().state(gradient)
        if not isinstance(self.when, Settled):
            return state
        return {**state, _SETTLING: Kept((4,), common=True)}

    def sums(self, load: Load) -> list[tf.Tensor]:
        """Sum by the method of the present stage."""
        when = self.when
        if not isinstance(when, Settled):
            return switched(load, tf.cast(load.step >= when, tf.int32), self)
        known = load.kept(_SETTLING)
        settled = tf.reduce_all(tf.stack([each[_SETTLED] for each in known]) > 0)
        sums = switched(load, tf.cast(settled, tf.int32), self)

        def look() -> tf.Tensor:
            load.keep(_SETTLING, [_seen(load, when, known[0], sums)] * len(known))
            return tf.constant(0)

        tf.cond(settled, lambda: tf.constant(0), look)
        return sums

    def __str__(self) -> str:
        when = self.when if isinstance(self.when, Settled) else f"until step {self.when}"
        return f"{self.first} {when}, then {self.then}"


def _seen(load: Load, when: Settled, known: tf.Tensor, sums: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the settling after one more step; a sum that is not finite does not count."""
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(total)) for total in sums])
    square = tf.add_n([tf.reduce_sum(tf.square(tf.cast(total, tf.float64))) for total in sums])
    square = tf.cast(tf.minimum(square, _LARGEST), tf.float32)
    steps, decay = known[_STEPS] + 1, 1 - 1 / when.over
    mean = decay * known[_MEAN] + (1 - decay) * square
    settling = tf.stack([steps, mean, known[_BEFORE], 0.0])
    looks = finite & (tf.math.floormod(steps, when.over) == 0)
    seen = tf.cond(looks, lambda: _looked(load, when, settling), lambda: settling)
    return tf.where(finite, seen, known)


def _looked(load: Load, when: Settled, settling: tf.Tensor) -> tf.Tensor:
    steps, mean, before, _ = tf.unstack(settling)
    # Different processors add in different orders: average, so that all decide by the same bits.
    mean = load.all_reduce(mean[tf.newaxis], LOSSLESS, what="variance")[0] / load.replicas
    now = mean / (1 - tf.pow(1 - 1 / when.over, steps))
    ratio = tf.math.divide_no_nan(tf.minimum(now, before), tf.maximum(now, before))
    settled = (ratio >= when.ratio) & (load.step >= when.after)
    return tf.stack([steps, mean, now, tf.cast(settled, tf.float32)])
