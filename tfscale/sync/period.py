"""Numbers of steps in rounds."""

from __future__ import annotations

import dataclasses
import math

from tfscale.support import arguments


@dataclasses.dataclass(frozen=True)
class Period:
    r"""Lengths of rounds, in steps, that grow or shrink from round to round.

    Round :math:`r` has :math:`a (b / a)^{r / n}` steps, rounded. Every round after the first
    :math:`n` has :math:`b` steps.

    Args:
        first: a, the number of steps in the first round.
        last: b, the number of steps in every round after the first n.
        rounds: n, the number of rounds before the rounds of b steps.

    Example:
        >>> [Period(first=1, last=16, rounds=4).steps(r) for r in range(6)]
        [1, 2, 4, 8, 16, 16]
    """

    first: int
    last: int
    rounds: int

    def __post_init__(self) -> None:
        for name in ("first", "last", "rounds"):
            checked_count(getattr(self, name), name)

    def steps(self, number: int) -> int:
        """Return the number of steps in a round.

        Args:
            number: number of the round, from 0.
        """
        share = min(number / self.rounds, 1.0)
        return round(self.first * math.pow(self.last / self.first, share))

    def table(self) -> list[int]:
        """Return the lengths of the first rounds, in steps; later rounds have the last length."""
        return [self.steps(number) for number in range(self.rounds + 1)]


def checked_period(
    every: int | Period,
    name: str = "every",
    what: str = "a tfscale.sync.Period or a number of steps",
) -> None:
    """Raise ``ValueError`` unless ``every`` is a ``Period`` or a number of steps."""
    if not isinstance(every, Period):
        checked_count(every, name, what=what)


def checked_count(
    value: object, name: str, least: int = 1, what: str = "a number of steps"
) -> None:
    """Raise ``ValueError`` unless a value is a whole number from ``least`` to 2**24."""
    arguments.whole(value, name, least, _MOST, what=what)


_MOST = 1 << 24  # all counts up to this are exact in float32
