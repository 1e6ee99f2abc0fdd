r"""Windows that slide along an axis, and the indices of the axis that each rank needs.

An array of :math:`n` indices along an axis lies on :math:`P` ranks: rank :math:`r` has the indices
:math:`[\lfloor r n / P \rfloor, \lfloor (r + 1) n / P \rfloor)`. A layer whose output :math:`o`
needs the inputs :math:`o s - p + d j` for :math:`j = 0, ..., k - 1` (kernel :math:`k`, stride
:math:`s`, dilation :math:`d`, padding :math:`p` in front) gives the outputs :math:`[a, b)` from the
inputs :math:`[a s - p, (b - 1) s - p + d (k - 1) + 1)`. What a rank needs and does not have, its
*halo*, other ranks send.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

VALID, SAME, CAUSAL = "valid", "same", "causal"


def slices(size: int, ranks: int) -> list[range]:
    """Return the indices of an axis that each rank has.

    Example:
        >>> slices(5, ranks=2)
        [range(0, 2), range(2, 5)]
    """
    return [range(r * size // ranks, (r + 1) * size // ranks) for r in range(ranks)]


def overlap(one: range, other: range) -> range:
    """Return the indices that are in both ranges.

    Example:
        >>> overlap(range(0, 5), range(3, 9))
        range(3, 5)
    """
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


class Reach(Protocol):
    """Says which inputs along an axis the outputs of a layer need."""

    @property
    def size(self) -> int:
        """Number of inputs."""

    @property
    def outputs(self) -> int:
        """Number of outputs."""

    def inputs(self, outputs: range) -> range:
        """Return the inputs that these outputs need, among them places beyond the ends."""


@dataclasses.dataclass(frozen=True)
class Window:
    """A window that slides along an axis, as that of a convolution or a pooling layer.

    Args:
        size: number of inputs.
        outputs: number of outputs.
        kernel: number of places of the window.
        stride: distance between the windows of two outputs.
        dilation: distance between two places of a window.
        before: places before the first input at which the first window begins; negative if it
            begins behind the first input.
    """

    size: int
    outputs: int
    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0

    @classmethod
    def of(cls, size: int, kernel: int, stride: int, dilation: int, padding: str) -> Window:
        """Return the window of a layer of Keras.

        Example:
            >>> Window.of(size=7, kernel=3, stride=2, dilation=1, padding="same")
            Window(size=7, outputs=4, kernel=3, stride=2, dilation=1, before=1)
        """
        wide = dilation * (kernel - 1)
        if padding == VALID:
            return cls(size, max(0, -(-(size - wide) // stride)), kernel, stride, dilation)
        outputs = -(-size // stride)
        missing = max(0, (outputs - 1) * stride + wide + 1 - size)
        before = wide if padding == CAUSAL else missing // 2
        return cls(size, outputs, kernel, stride, dilation, before)

    def inputs(self, outputs: range) -> range:
        """See ``Reach``."""
        first = outputs.start * self.stride - self.before
        last = (outputs.stop - 1) * self.stride - self.before + self.dilation * (self.kernel - 1)
        return range(first, last + 1)

    def real_places(self, outputs: range) -> list[int]:
        """Return how many places of each output's window are inputs, and not padding.

        Example:
            >>> Window.of(size=4, kernel=3, stride=1, dilation=1, padding="same").real_places(
            ...     range(4)
            ... )
            [2, 3, 3, 2]
        """
        return [
            sum(
                0 <= output * self.stride - self.before + self.dilation * place < self.size
                for place in range(self.kernel)
            )
            for output in outputs
        ]


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A window of a transposed convolution: input ``i`` adds to ``i * stride - before + place``.

    Args:
        size: number of inputs.
        kernel: number of places of the window.
        stride: distance between the windows of two inputs.
        padding: ``"valid"`` or ``"same"``.
    """

    size: int
    kernel: int
    stride: int
    padding: str

    @property
    def before(self) -> int:
        """Number of first places that the layer cuts off."""
        return 0 if self.padding == VALID else max(0, self.kernel - self.stride) // 2

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        more = max(0, self.kernel - self.stride) if self.padding == VALID else 0
        return self.size * self.stride + more

    def inputs(self, outputs: range) -> range:
        """See ``Reach``."""
        first, last = outputs.start + self.before, outputs.stop - 1 + self.before
        start = min(-((self.kernel - 1 - first) // self.stride), first // self.stride)
        start = min(max(0, start), self.size - 1)
        return range(start, min(last // self.stride + 1, self.size))

    def cut_off(self, outputs: range) -> int:
        """Return how many first results of the needed inputs belong to no output of a range."""
        return outputs.start + self.before - self.inputs(outputs).start * self.stride


@dataclasses.dataclass(frozen=True)
class Repeated:
    """A layer that repeats each input.

    Args:
        size: number of inputs.
        times: how often each input is repeated.
    """

    size: int
    times: int

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return self.size * self.times

    def inputs(self, outputs: range) -> range:
        """See ``Reach``."""
        return range(outputs.start // self.times, (outputs.stop - 1) // self.times + 1)

    def cut_off(self, outputs: range) -> int:
        """Return how many first results of the needed inputs belong to no output of a range."""
        return outputs.start - self.inputs(outputs).start * self.times


@dataclasses.dataclass(frozen=True)
class Moves:
    """Indices of an axis that ranks send each other, so that each has what it needs.

    Args:
        have: the indices that each rank has; together all, each of them once.
        need: the indices that each rank needs, and that exist.

    Example:
        >>> halo = Moves.of(Window.of(8, kernel=3, stride=1, dilation=1, padding="same"), ranks=2)
        >>> halo.sent(0), halo.received(0), halo.number
        ([range(0, 0), range(3, 4)], [range(0, 0), range(4, 5)], 2)
    """

    have: tuple[range, ...]
    need: tuple[range, ...]

    @classmethod
    def of(cls, reach: Reach, ranks: int) -> Moves:
        """Return what ranks send each other for a layer whose outputs they share out."""
        every = range(reach.size)
        need = [overlap(reach.inputs(own), every) for own in slices(reach.outputs, ranks)]
        return cls(tuple(slices(reach.size, ranks)), tuple(need))

    @classmethod
    def of_all(cls, size: int, ranks: int) -> Moves:
        """Return what ranks send each other so that each has all indices."""
        return cls(tuple(slices(size, ranks)), (range(size),) * ranks)

    def kept(self, rank: int) -> range:
        """Return the indices that a rank has and needs."""
        return overlap(self.need[rank], self.have[rank])

    def sent(self, rank: int) -> list[range]:
        """Return the indices that a rank sends to each rank."""
        return [self._moved(rank, other) for other in range(len(self.need))]

    def received(self, rank: int) -> list[range]:
        """Return the indices that a rank gets from each rank."""
        return [self._moved(other, rank) for other in range(len(self.need))]

    @property
    def number(self) -> int:
        """Number of indices that all ranks send."""
        return sum(len(each) for rank in range(len(self.need)) for each in self.sent(rank))

    def _moved(self, source: int, target: int) -> range:
        found = overlap(self.need[target], self.have[source])
        return range(found.start, found.start) if source == target else found


def padding_of(needed: range, size: int) -> tuple[int, int]:
    """Return how many places of a range lie before the first index of an axis, and after the last.

    Example:
        >>> padding_of(range(-1, 4), size=8)
        (1, 0)
    """
    before = len(range(needed.start, min(needed.stop, 0)))
    return before, len(range(max(needed.start, size), needed.stop))


def others_padding(window: Window) -> tuple[int, int]:
    """Return the padding of an axis that no rank cuts: negative numbers are cut off.

    Example:
        >>> others_padding(Window.of(7, kernel=3, stride=2, dilation=1, padding="same"))
        (1, 1)
    """
    needed = window.inputs(range(window.outputs))
    return -needed.start, max(0, needed.stop - window.size)


def fits(sizes: Sequence[int], ranks: int) -> bool:
    """Return whether each rank gets an index of each of these axes."""
    return all(size >= ranks for size in sizes)
