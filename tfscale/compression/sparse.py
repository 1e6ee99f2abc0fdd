r"""Sparse methods: a few numbers of each gradient, and all others later.

With the replicas' gradients :math:`G_i` and what they have not sent yet, :math:`E_i`, each replica
sends a part of :math:`M_i = G_i + E_i` and keeps the rest:

.. math:: S = \sum_i C_i(M_i), \quad E_i' = M_i - C_i(M_i)

``TopK`` sends the largest numbers, each replica its own, with their places; ``RandomK`` sends the
same places on all replicas, drawn from a seed that all share, so that no place travels.

References: Aji, Heafield: Sparse communication (EMNLP 2017), arXiv 1704.05021; Stich, Cordonnier,
Jaggi: Sparsified SGD with memory (NeurIPS 2018), arXiv 1809.07599; Lin et al.: Deep gradient
compression (ICLR 2018), arXiv 1712.01887.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import tensorflow as tf

from tfscale.compression.gradient import Gradient
from tfscale.compression.method import RESIDUAL, Kept, Load, Method, Wire, joined, separated
from tfscale.ops.select import largest, sum_at
from tfscale.wires import FORMATS, LOSSLESS, checked

_VELOCITY = "velocity"
_INDEX_BYTES = 4


def _check(fraction: float, wire: str) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(
            f"fraction is the part of a gradient's numbers that is sent, more than 0 and at most "
            f"1, such as 0.01; got {fraction!r}"
        )
    checked(wire)


def _count(fraction: float, gradient: Gradient) -> int:
    """How many of its numbers are sent: one at least."""
    return min(gradient.elements, max(1, math.ceil(fraction * gradient.elements)))


@dataclasses.dataclass(frozen=True)
class TopK(Method):
    """Each replica sends the largest numbers of each gradient, with their places.

    Exactly k of each variable: of equal numbers those that come first. Numbers that are not
    finite count as the largest.

    Args:
        fraction: which part of a gradient's numbers is sent, at least one.
        feedback: whether all others are added to the gradients of the next step.
        wire: the format of the numbers; places take 4 bytes each.
        momentum: correct what is sent late as if a momentum of that size had seen it in time
            (deep gradient compression): each replica adds up velocities instead of gradients.
            Then give the optimizer no momentum of its own.

    Example:
        >>> strategy = tfscale.ScaleStrategy(method={"kernel$": TopK(0.01)})
    """

    fraction: float = 0.01
    feedback: bool = True
    wire: str = LOSSLESS
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _check(self.fraction, self.wire)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is 0 or more and less than 1; got {self.momentum!r}")
        if self.momentum and not self.feedback:
            raise ValueError(
                f"momentum={self.momentum!r} is for what is sent late, and without feedback "
                "nothing is. Leave one of them out"
            )

    @property
    def others(self) -> tuple[Method, ...]:  # type: ignore[override]
        return (Wire(),)

    @property
    def wires(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.wire,)

    @property
    def random(self) -> bool:  # type: ignore[override]
        return FORMATS[self.wire].rounds_at_random(with_residual=False)

    def suited(self, gradient: Gradient) -> Method:
        """Itself; nothing is to be selected of nothing."""
        return self if gradient.elements else self.others[0]

    def state(self, gradient: Gradient) -> Mapping[str, Kept]:
        """What has not been sent yet, and the velocity."""
        kept = {RESIDUAL: Kept(gradient.shape)} if self.feedback else {}
        return {**kept, _VELOCITY: Kept(gradient.shape)} if self.momentum else kept

    def sums(self, load: Load) -> list[tf.Tensor]:
        """See the module."""
        sizes = [each.elements for each in load.described]
        counts = [_count(self.fraction, each) for each in load.described]
        flat = joined(load.gradients)
        if self.momentum:
            flat = velocity = self.momentum * joined(load.kept(_VELOCITY)) + flat
        if self.feedback:
            old = joined(load.kept(RESIDUAL))
            flat = flat + old
        places = largest(flat, sizes, counts)
        chosen = tf.gather(flat, places)
        values = load.all_gather(chosen, self.wire, what="values")
        every = load.all_gather(places, what="places")
        total = sum_at(values, every, sum(sizes))
        if self.feedback:
            count = sum(counts)
            sent = values[load.rank * count : (load.rank + 1) * count]
            finite = tf.reduce_all(tf.math.is_finite(values))
            rest = tf.tensor_scatter_nd_update(flat, places[:, tf.newaxis], chosen - sent)
            load.keep(RESIDUAL, separated(tf.where(finite, rest, old), load.gradients))
        if self.momentum:
            stopped = tf.tensor_scatter_nd_update(
                velocity, places[:, tf.newaxis], tf.zeros_like(chosen)
            )
            before = joined(load.kept(_VELOCITY))
            load.keep(_VELOCITY, separated(tf.where(finite, stopped, before), load.gradients))
        return separated(total, load.gradients)

    def __str__(self) -> str:
        return f"TopK({self.fraction:g})" + (" + feedback" if self.feedback else "")


@dataclasses.dataclass(frozen=True)
class RandomK(Method):
    """All replicas send the same numbers of each gradient, others in each step: no places travel.

    Places are drawn by a seed that all replicas share, so that an ordinary all-reduce adds what
    they send, and any algorithm will do.

    Args:
        fraction: which part of a gradient's numbers is sent, at least one.
        feedback: whether all others are added to the gradients of the next step. Without it sums
            are multiplied by ``1 / fraction``, which makes them right on average.
        wire: the format of the numbers.

    Example:
        >>> strategy = tfscale.ScaleStrategy(method={"kernel$": RandomK(0.1)})
    """

    fraction: float = 0.1
    feedback: bool = True
    wire: str = LOSSLESS
    random = True

    def __post_init__(self) -> None:
        _check(self.fraction, self.wire)

    @property
    def others(self) -> tuple[Method, ...]:  # type: ignore[override]
        return (Wire(),)

    @property
    def wires(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.wire,)

    def suited(self, gradient: Gradient) -> Method:
        """Itself; nothing is to be drawn of nothing."""
        return self if gradient.elements else self.others[0]

    def state(self, gradient: Gradient) -> Mapping[str, Kept]:
        """What has not been sent yet."""
        return {RESIDUAL: Kept(gradient.shape)} if self.feedback else {}

    def sums(self, load: Load) -> list[tf.Tensor]:
        """See the module."""
        flat = joined(load.gradients)
        if self.feedback:
            old = joined(load.kept(RESIDUAL))
            flat = flat + old
        places = self._places(load)
        chosen = tf.gather(flat, places)[:, 0]
        if self.feedback and not FORMATS[self.wire].lossless:
            total, lost = load.all_reduce(chosen, self.wire, tf.zeros_like(chosen))
        else:
            total, lost = load.all_reduce(chosen, self.wire), tf.zeros_like(chosen)
        if self.feedback:
            finite = tf.reduce_all(tf.math.is_finite(total))
            rest = tf.tensor_scatter_nd_update(flat, places, lost)
            load.keep(RESIDUAL, separated(tf.where(finite, rest, old), load.gradients))
        sums = tf.scatter_nd(places, total, tf.shape(flat))
        return separated(sums if self.feedback else sums / self.fraction, load.gradients)

    def _places(self, load: Load) -> tf.Tensor:
        """In the joined gradients, as a column."""
        seed, start, places = load.seed(), 0, []
        for number, gradient in enumerate(load.described):
            draws = tf.random.stateless_uniform(
                [gradient.elements], tf.stack([seed, tf.cast(number, tf.int64)])
            )
            found = largest(draws, [gradient.elements], [_count(self.fraction, gradient)])
            places.append(found + start)
            start += gradient.elements
        return tf.concat(places, 0)[:, tf.newaxis]

    def __str__(self) -> str:
        return f"RandomK({self.fraction:g})" + (" + feedback" if self.feedback else "")
