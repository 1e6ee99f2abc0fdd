"""Table that ``strategy.layouts()`` returns: it shows who holds which weights and slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfscale.parallel.layout import Layout
from tfscale.support.sizes import in_words
from tfscale.support.text import entries


@dataclasses.dataclass(frozen=True)
class Held:
    """A weight and its slots.

    Args:
        path: path of the weight.
        shape: shape of the whole weight.
        weight: layout of the weight, and bytes of one of its numbers.
        slots: layouts of the optimizer's slots of the weight, with the bytes of their numbers.
        why: the reason for the slots' layouts.
    """

    path: str
    shape: tuple[int, ...]
    weight: tuple[Layout, int]
    slots: tuple[tuple[Layout, int], ...]
    why: str

    def bytes(self, rank: int) -> tuple[int, int]:
        """Return the bytes of the weight and of its slots that a rank holds, without padding."""
        layout, size = self.weight
        return layout.held(rank) * size, sum(slot.held(rank) * size for slot, size in self.slots)

    @property
    def words(self) -> str:
        """Path and shape, the layout of the slots, and the reason for it."""
        slots = self.slots[0][0].words if self.slots else "none"
        return f"{self.path} {self.shape}: {self.weight[0].words}; slots: {slots} ({self.why})"


class Table(list[Held]):
    """Weights and their slots; ``print`` shows the table, with bytes for each rank.

    Args:
        rows: the weights.
        ranks: number of ranks.
        notes: sentences about layers that compute with parts of activations.
    """

    def __init__(self, rows: Sequence[Held], ranks: int, notes: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self.ranks, self.notes = ranks, list(notes)

    def numbers(self, rank: int) -> int:
        """Return how many numbers a rank holds of all weights and slots, without padding."""
        return sum(each.held(rank) for row in self for each, _ in (row.weight, *row.slots))

    def __str__(self) -> str:
        ranks = range(self.ranks)
        columns = [f"rank {rank}" for rank in ranks]
        every = [(row.words, [_both(*row.bytes(rank)) for rank in ranks]) for row in self]
        total = [
            _both(*(sum(row.bytes(rank)[of] for row in self) for of in (0, 1))) for rank in ranks
        ]
        table = entries(columns, [*every, ("all: weights + slots", total)])
        return "\n".join([table, *self.notes])

    __repr__ = __str__


def _both(weight: int, slots: int) -> str:
    return f"{in_words(weight)} + {in_words(slots)}"
