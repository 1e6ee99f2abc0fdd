r"""Sparse methods: send a few numbers of each gradient, and all others later.

Each replica has its gradient :math:`G_i` and its residual :math:`E_i`. It sends a part of
:math:`M_i = G_i + E_i` and keeps the rest:

.. math:: S = \sum_i C_i(M_i), \quad E_i' = M_i - C_i(M_i)

``TopK`` sends the largest numbers of each replica, with their indices. If a sum of whole tensors,
zero elsewhere, costs less, it computes the same sums that way. ``RandomK`` sends the same indices
on all replicas, drawn from a common seed, so that no index is sent.

References: Aji, Heafield: Sparse communication (EMNLP 2017), arXiv 1704.05021; Stich, Cordonnier,
Jaggi: Sparsified SGD with memory (NeurIPS 2018), arXiv 1809.07599; Lin et al.: Deep gradient
compression (ICLR 2018), arXiv 1712.01887.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfscale.collectives.wires import FORMATS, LOSSLESS, checked, nbytes
from tfscale.compression.gradient import Gradient
from tfscale.compression.method import RESIDUAL, Kept, Load, Method, Wire, joined, separated
from tfscale.compression.staged import Staged
from tfscale.native import compression as ops
from tfscale.support import arguments

_VELOCITY = "velocity"
_BYTES_OF_A_PLACE = 4
_WARMS_FROM = 0.25  # share of the numbers, as in the paper
_MOST_STAGES = 100  # largest nesting of methods


def _count(fraction: float, gradient: Gradient) -> int:
    """Return the number of a gradient's elements that are sent: at least one."""
    return min(gradient.elements, max(1, math.ceil(fraction * gradient.elements)))


@dataclasses.dataclass(frozen=True)
class _Sparse(Method):
    """A method that sends some numbers of each gradient; see its subclasses for the arguments."""

    fraction: float
    feedback: bool = True
    wire: str = LOSSLESS

    def __post_init__(self) -> None:
        what = "the part of a gradient's numbers that is sent"
        arguments.real(self.fraction, "fraction", above=0, most=1, what=what, example="0.01")
        arguments.flag(self.feedback, "feedback")
        checked(self.wire)

    @property
    def others(self) -> tuple[Method, ...]:  # type: ignore[override]
        """The fp32 wire, for gradients without numbers."""
        return (Wire(),)

    @property
    def wires(self) -> tuple[str, ...]:  # type: ignore[override]
        """The wire of the numbers."""
        return (self.wire,)

    def suited(self, gradient: Gradient) -> Method:
        """Return this method, or a wire for a gradient without numbers."""
        return self if gradient.elements else self.others[0]

    def state(self, gradient: Gradient) -> Mapping[str, Kept]:
        """Return the residual."""
        return {RESIDUAL: Kept(gradient.shape)} if self.feedback else {}

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.fraction:g})" + (
            " + feedback" if self.feedback else ""
        )


@dataclasses.dataclass(frozen=True)
class TopK(_Sparse):
    """A method that sends the largest numbers of each gradient, with their indices.

    Each replica sends exactly k numbers of each variable; among equal numbers, the first ones.
    Numbers that are not finite count as the largest. Replicas gather the parts of all replicas.
    With many replicas or large parts, this costs more than the sum of whole tensors; then they sum
    whole tensors. That costs as much as the wire alone, which loses less: ``explain()`` says so.

    Args:
        fraction: share of a gradient's numbers that is sent, at least one number.
        feedback: whether all others are added to the gradients of the next step.
        wire: the format of the numbers; indices take 4 bytes each.
        momentum: corrects delayed numbers as if a momentum of that size had applied in time (deep
            gradient compression): each replica accumulates velocities instead of gradients. Then
            give the optimizer no momentum; gradients with another method, such as those of biases,
            have none then.

    Example:
        >>> strategy = tfscale.ScaleStrategy(method={"kernel$": TopK(0.01)})
    """

    fraction: float = 0.01
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.real(self.momentum, "momentum", 0, below=1)
        if self.momentum and not self.feedback:
            raise ValueError(
                f"momentum={self.momentum!r} needs feedback=True: it corrects numbers that "
                "feedback delays. Leave out momentum, or feedback=False"
            )

    def warmed_up(self, over: int, stages: int = 4) -> Staged:
        r"""Return a method that sends more at the beginning (deep gradient compression).

        Of S stages of equal length, stage s = 0, 1, ... sends the share :math:`(1/4)^{1 - s/S}\,
        f^{s/S}` of the numbers; after them follows the fraction f. The residual carries over to the
        next stage; the velocities of ``momentum`` begin anew.

        Args:
            over: number of updates of all stages together.
            stages: S.

        Example:
            >>> method = TopK(0.001).warmed_up(over=400)  # 25 %, 6.3, 1.6, 0.4, and then 0.1
            >>> strategy = tfscale.ScaleStrategy(method={"kernel$": method})
        """
        over = arguments.whole(over, "over", 1, what="a number of updates")
        what = "a number of parts of these updates"
        stages = arguments.whole(stages, "stages", 1, min(over, _MOST_STAGES), what=what)
        if self.fraction >= _WARMS_FROM:
            raise ValueError(
                f"fraction={self.fraction!r} must be less than {_WARMS_FROM} for a warm-up, which "
                f"begins with {_WARMS_FROM} of the numbers. Leave out warmed_up"
            )
        method: Method = self
        for stage in reversed(range(stages)):
            share = stage / stages
            more = dataclasses.replace(
                self, fraction=_WARMS_FROM ** (1 - share) * self.fraction**share
            )
            method = Staged(more, method, when=round(over * (stage + 1) / stages))
        assert isinstance(method, Staged)
        return method

    @property
    def random(self) -> bool:  # type: ignore[override]
        """Whether the wire rounds at random."""
        return FORMATS[self.wire].rounds_at_random(with_residual=self.feedback)

    def state(self, gradient: Gradient) -> Mapping[str, Kept]:
        """Return the residual and the velocity."""
        kept = super().state(gradient)
        return {**kept, _VELOCITY: Kept(gradient.shape)} if self.momentum else kept

    def sums(self, load: Load) -> list[tf.Tensor]:
        """Sum the largest numbers: see the module."""
        given = load.gradients
        if self.momentum:
            before = load.kept(_VELOCITY)
            given = [self.momentum * u + g for u, g in zip(before, given)]
        counts = [_count(self.fraction, each) for each in load.described]
        numbers, chosen = sum(each.elements for each in load.described), sum(counts)
        join = load.price(gathered=[_BYTES_OF_A_PLACE * chosen, nbytes(self.wire, chosen)])
        whole = load.price(reduced=[nbytes(self.wire, numbers)])
        if whole < join and FORMATS[self.wire].keeps_zeros:
            load.say(
                f"whole tensors summed, for {whole}; gathering the parts costs {join}. "
                f"{self} does not pay here: the wire {self.wire!r} sends as much and loses less"
            )
            return self._summed(load, given, counts)
        load.say(f"for {join}; a sum of whole tensors costs {whole}")
        return self._joined(load, given, counts)

    def _summed(
        self, load: Load, given: Sequence[tf.Tensor], counts: Sequence[int]
    ) -> list[tf.Tensor]:
        """Sum tensors that are zero where nothing is sent, in one all-reduce."""
        passes = _Plain(load, given, self.feedback)
        found = [passes.largest(i, count) for i, count in enumerate(counts)]
        chosen = [_with(tf.zeros_like(g), *sent) for g, sent in zip(given, found)]
        total, lost = _all_reduced(load, joined(chosen), self.wire, self.feedback)
        finite = tf.reduce_all(tf.math.is_finite(total))
        self._stop(load, given, found, finite)
        for i, (sent, late) in enumerate(zip(chosen, separated(lost, chosen))):
            passes.keep(i, passes.wholes[i] - sent + late, finite)
        return separated(total, chosen)

    def _joined(
        self, load: Load, given: Sequence[tf.Tensor], counts: Sequence[int]
    ) -> list[tf.Tensor]:
        """Gather all indices and numbers, and add them up on each replica."""
        passes = (
            _Fused(load, given)
            if self.feedback and load.on_cpu
            else _Plain(load, given, self.feedback)
        )
        found = [passes.largest(i, count) for i, count in enumerate(counts)]
        places, numbers = [tf.concat(each, 0) for each in zip(*found)]
        all_places = tf.reshape(load.all_gather(places, what="places"), [load.replicas, -1])
        all_numbers = load.all_gather(numbers, self.wire, what="values")
        finite = tf.reduce_all(tf.math.is_finite(all_numbers))
        all_numbers = tf.reshape(all_numbers, [load.replicas, -1])
        self._stop(load, given, found, finite)
        sums, start = [], 0
        for i, (own, chosen) in enumerate(found):
            here = slice(start, start + counts[i])
            kept = chosen - all_numbers[load.rank, here]
            every_place = tf.reshape(all_places[:, here], [-1])
            every_number = tf.reshape(all_numbers[:, here], [-1])
            sums.append(passes.sum(i, own, kept, every_place, every_number, finite))
            start += counts[i]
        return sums

    def _stop(
        self,
        load: Load,
        velocities: Sequence[tf.Tensor],
        found: Sequence[tuple[tf.Tensor, tf.Tensor]],
        finite: tf.Tensor,
    ) -> None:
        """Reset the velocity of numbers that are sent."""
        if not self.momentum:
            return
        stopped = [
            _with(u, each, tf.zeros_like(sent)) for u, (each, sent) in zip(velocities, found)
        ]
        before = load.kept(_VELOCITY)
        load.keep(_VELOCITY, [tf.where(finite, new, old) for new, old in zip(stopped, before)])


class _Plain:
    """The passes over a bucket's gradients and residuals, as TensorFlow operations."""

    def __init__(self, load: Load, given: Sequence[tf.Tensor], feedback: bool) -> None:
        self._load, self._feedback = load, feedback
        self._old = load.kept(RESIDUAL) if feedback else []
        self.wholes = [g + e for g, e in zip(given, self._old)] if feedback else list(given)

    def largest(self, i: int, count: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the indices and the numbers of the i-th gradient that are sent."""
        return ops.largest(self.wholes[i], count)

    def at(self, i: int, places: tf.Tensor) -> tf.Tensor:
        """Return the numbers of the i-th gradient at these indices."""
        return tf.gather(tf.reshape(self.wholes[i], [-1]), places)

    def keep(self, i: int, rest: tf.Tensor, finite: tf.Tensor) -> None:
        """Keep this replica's residual of the i-th gradient, if the sum is finite."""
        if self._feedback:
            rest = tf.where(finite, rest, self._old[i])
            self._load.variables(RESIDUAL)[i].assign(rest)

    def sum(
        self,
        i: int,
        places: tf.Tensor,
        kept: tf.Tensor,
        every_place: tf.Tensor,
        every_number: tf.Tensor,
        finite: tf.Tensor,
    ) -> tf.Tensor:
        """Return the sum of the i-th gradient; keep the residual, if the sum is finite."""
        whole = self.wholes[i]
        self.keep(i, _with(whole, places, kept), finite)
        # Add one replica after the other. On GPUs the order is undefined in which one operation
        # adds several numbers at one index, and replicas must end with the same bits.
        sums = tf.zeros([tf.size(whole)])
        count = max(1, places.shape[0])
        for first in range(0, every_place.shape[0], count):
            at = every_place[first : first + count, tf.newaxis]
            sums = tf.tensor_scatter_nd_add(sums, at, every_number[first : first + count])
        return tf.reshape(sums, tf.shape(whole))


class _Fused:
    """The passes in C++, for CPUs, with feedback: two passes, which make only the sum."""

    def __init__(self, load: Load, given: Sequence[tf.Tensor]) -> None:
        self._given, self._rests = given, load.variables(RESIDUAL)

    def largest(self, i: int, count: int) -> tuple[tf.Tensor, tf.Tensor]:
        return ops.largest(self._given[i], count, self._rests[i])

    def sum(
        self,
        i: int,
        places: tf.Tensor,
        kept: tf.Tensor,
        every_place: tf.Tensor,
        every_number: tf.Tensor,
        finite: tf.Tensor,
    ) -> tf.Tensor:
        numbers = (places, kept, every_place, every_number)
        return ops.sum_at(self._given[i], *numbers, finite, self._rests[i])


def _all_reduced(
    load: Load, x: tf.Tensor, wire: str, feedback: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the sum, and this replica's rounding error if it is sent later."""
    if feedback and not FORMATS[wire].lossless:
        total, lost = load.all_reduce(x, wire, tf.zeros_like(x))
        return total, lost
    return load.all_reduce(x, wire), tf.zeros_like(x)


def _nan_unless_finite(chosen: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
    """Return the numbers to send; the first becomes NaN if any number of the gradient is infinite.

    Loss scaling must skip the step on all replicas, also if no infinite number is drawn.
    """
    first = tf.where(tf.reduce_all(tf.math.is_finite(whole)), chosen[:1], math.nan)
    return tf.concat([first, chosen[1:]], 0)


def _with(x: tf.Tensor, places: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """Return a tensor with other numbers at these indices."""
    flat = tf.reshape(x, [-1])
    changed = tf.tensor_scatter_nd_update(flat, places[:, tf.newaxis], numbers)
    return tf.reshape(changed, tf.shape(x))


@dataclasses.dataclass(frozen=True)
class RandomK(_Sparse):
    """A method that sends random numbers of each gradient, the same ones on all replicas.

    A common seed draws new indices in each step, so no index is sent, and an ordinary all-reduce by
    any algorithm adds the numbers.

    Args:
        fraction: share of a gradient's numbers that is sent, at least one number.
        feedback: whether all others are added to the gradients of the next step. Without feedback,
            sums are divided by the share, which makes them unbiased.
        wire: the format of the numbers.

    Example:
        >>> strategy = tfscale.ScaleStrategy(method={"kernel$": RandomK(0.1)})
    """

    fraction: float = 0.1
    random = True

    def sums(self, load: Load) -> list[tf.Tensor]:
        """Sum random numbers: see the module."""
        passes = _Plain(load, load.gradients, self.feedback)
        places = self._places(load)
        numbers = [
            _nan_unless_finite(passes.at(i, each), whole)
            for i, (each, whole) in enumerate(zip(places, passes.wholes, strict=True))
        ]
        total, lost = _all_reduced(load, joined(numbers), self.wire, self.feedback)
        finite = tf.reduce_all(tf.math.is_finite(total))
        parts = zip(places, separated(lost, numbers), separated(total, numbers))
        sums = [
            passes.sum(i, each, kept, each, all_of_it, finite)
            for i, (each, kept, all_of_it) in enumerate(parts)
        ]
        if self.feedback:
            return sums
        chances = [_count(self.fraction, each) / each.elements for each in load.described]
        return [total / chance for total, chance in zip(sums, chances)]

    def _places(self, load: Load) -> list[tf.Tensor]:
        """Return indices in each gradient, the same on all replicas."""
        found = []
        for number, gradient in enumerate(load.described):
            seed = tf.stack([load.seed(), tf.constant(number, tf.int64)])
            draws = tf.random.stateless_uniform([gradient.elements], seed)
            found.append(ops.largest(draws, _count(self.fraction, gradient))[0])
        return found
