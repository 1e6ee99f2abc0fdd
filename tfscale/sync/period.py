"""How many steps each round has."""

from __future__ import annotations

import dataclasses
import math

from tfscale import arguments


@dataclasses.dataclass(frozen=True)
class Period:
    r"""Rounds that get longer, or shorter.

    Round :math:`r` has :math:`a (b / a)^{r / n}` steps, rounded, and every round after
    :math:`n` rounds has :math:`b`.

    Args:
        first: a, the steps of the first round.
        last: b.
        rounds: n, after how many rounds they have b steps.

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
        """Of the round of that number, from 0."""
        share = min(number / self.rounds, 1.0)
        return round(self.first * math.pow(self.last / self.first, share))

    def table(self) -> list[int]:
        """Of all rounds; those behind its end are as long as the last."""
        return [self.steps(number) for number in range(self.rounds + 1)]


def table_of(every: int | Period) -> list[int]:
    """The same of a period, or of a number of steps."""
    return every.table() if isinstance(every, Period) else [every]


def checked_period(every: int | Period) -> None:
    """Refuse what is neither."""
    if not isinstance(every, Period):
        checked_count(every, "every", what="a tfscale.sync.Period or a number of steps")


def checked_count(
    value: object, name: str, least: int = 1, what: str = "a number of steps"
) -> None:
    """Refuse what is not a whole number of at least so many."""
    arguments.whole(value, name, least, _MOST, what=what)


_MOST = 1 << 24  # counted in float32
