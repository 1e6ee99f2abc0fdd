r"""Layouts of arrays: which rank holds which numbers.

To Keras a variable stays whole: its shape, its files, what it is assigned. On a replica it is the
*part* that the replica's rank holds. Equally many ranks hold each number: ``verify``.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import tensorflow as tf

from tfscale.exchange.slots import size_of_shard

_NOTHING = (0,)  # shape of the part of a rank that holds no numbers


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout of an array among ranks.

    Args:
        shape: shape of the whole array.
        ranks: number of ranks.
    """

    shape: tuple[int, ...]
    ranks: int
    kind: ClassVar[str]

    @property
    def words(self) -> str:
        """Words for who holds what."""
        return self.kind

    @property
    def numbers(self) -> int:
        """Number of numbers of the whole array."""
        return math.prod(self.shape)

    @property
    def holder(self) -> int | None:
        """The only rank that holds numbers; None if several do."""
        return None

    def held(self, rank: int) -> int:
        """Return how many numbers of the array a rank holds, without padding."""
        return sum(1 for _ in self.places(rank))

    def places(self, rank: int) -> Iterator[int]:
        """Yield the places that a rank holds, in the array in row-major order."""
        raise NotImplementedError

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        raise NotImplementedError

    def part(self, whole: tf.Tensor, rank: int) -> tf.Tensor:
        """Return a rank's part of a whole array."""
        raise NotImplementedError

    def view(self, held: tf.Tensor, rank: int) -> tf.Tensor:
        """Return a rank's part of what the rank holds of an array, in its memory if that works."""
        return self.part(held, rank)

    def whole(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the whole array from the parts of all ranks."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Copy(Layout):
    """Every rank holds the whole array.

    Example:
        >>> Copy((2, 3), ranks=4).held(0)
        6
    """

    kind = "copy"

    @property
    def words(self) -> str:
        """See ``Layout``."""
        return "a copy on each rank"

    def held(self, rank: int) -> int:
        """See ``Layout``."""
        return self.numbers

    def places(self, rank: int) -> Iterator[int]:
        """See ``Layout``."""
        yield from range(self.numbers)

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """See ``Layout``."""
        return self.shape

    def part(self, whole: tf.Tensor, rank: int) -> tf.Tensor:
        """See ``Layout``."""
        return whole

    def whole(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """See ``Layout``."""
        return parts[0]


@dataclasses.dataclass(frozen=True)
class Flat(Layout):
    """The array in row-major order is cut into equal vectors, one for each rank.

    Each part holds n / P numbers of n, rounded up; zeros fill up the last parts.

    Example:
        >>> layout = Flat((2, 3), ranks=4)
        >>> [layout.held(rank) for rank in range(4)]
        [2, 2, 2, 0]
    """

    kind = "flat"

    @property
    def words(self) -> str:
        """See ``Layout``."""
        return f"1/{self.ranks} on each rank"

    @property
    def size(self) -> int:
        """Number of numbers of each part, with padding."""
        return size_of_shard(self.shape, self.ranks)

    def range(self, rank: int) -> range:
        """Return the places that a rank holds."""
        first = min(rank * self.size, self.numbers)
        return range(first, min(first + self.size, self.numbers))

    def held(self, rank: int) -> int:
        """See ``Layout``."""
        return len(self.range(rank))

    def places(self, rank: int) -> Iterator[int]:
        """See ``Layout``."""
        yield from self.range(rank)

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """See ``Layout``."""
        return (self.size,)

    def part(self, whole: tf.Tensor, rank: int) -> tf.Tensor:
        """See ``Layout``."""
        own = self.range(rank)
        found = tf.reshape(_slice(tf.reshape(whole, [1, -1]), [0, own.start], [1, len(own)]), [-1])
        return self._padded(found)

    def view(self, held: tf.Tensor, rank: int) -> tf.Tensor:
        """See ``Layout``; the memory is shared if the part begins and ends at 64 bytes."""
        own = self.range(rank)
        return self._padded(tf.slice(tf.reshape(held, [-1]), [own.start], [len(own)]))

    def _padded(self, part: tf.Tensor) -> tf.Tensor:
        missing = self.size - part.shape[0]
        return tf.pad(part, [[0, missing]]) if missing else part

    def rows(self, whole: tf.Tensor) -> tf.Tensor:
        """Return the parts of all ranks, one row for each."""
        flat = tf.reshape(whole, [-1])
        missing = self.ranks * self.size - self.numbers
        flat = tf.pad(flat, [[0, missing]]) if missing else flat
        return tf.reshape(flat, [self.ranks, self.size])

    def whole(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """See ``Layout``."""
        rows: tf.Tensor = parts if tf.is_tensor(parts) else tf.stack(parts)
        if rows.shape.num_elements() != self.numbers:
            rows = tf.reshape(rows, [-1])[: self.numbers]
        return tf.reshape(rows, self.shape)


@dataclasses.dataclass(frozen=True)
class Owned(Layout):
    """One rank holds the whole array; the parts of the others are empty.

    Example:
        >>> layout = Owned((2, 3), ranks=2, owner=1)
        >>> [layout.part_shape(rank) for rank in range(2)]
        [(0,), (2, 3)]
    """

    owner: int = 0
    kind = "owned"

    @property
    def words(self) -> str:
        """See ``Layout``."""
        return f"whole on rank {self.owner}"

    @property
    def holder(self) -> int:
        """See ``Layout``."""
        return self.owner

    def held(self, rank: int) -> int:
        """See ``Layout``."""
        return self.numbers if rank == self.owner else 0

    def places(self, rank: int) -> Iterator[int]:
        """See ``Layout``."""
        yield from range(self.held(rank))

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """See ``Layout``."""
        return self.shape if rank == self.owner else _NOTHING

    def part(self, whole: tf.Tensor, rank: int) -> tf.Tensor:
        """See ``Layout``."""
        return whole if rank == self.owner else tf.zeros(_NOTHING, whole.dtype)

    def whole(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """See ``Layout``."""
        return parts[self.owner]


@dataclasses.dataclass(frozen=True)
class Split(Layout):
    """The array is cut along one axis; parts differ by at most one index of the axis.

    Example:
        >>> layout = Split((5, 2), ranks=2, axis=0)
        >>> [layout.part_shape(rank) for rank in range(2)]
        [(2, 2), (3, 2)]
    """

    axis: int = 0
    kind = "split"

    @property
    def words(self) -> str:
        """See ``Layout``."""
        return f"cut along axis {self.axis}"

    def range(self, rank: int) -> range:
        """Return the indices of the axis that a rank holds."""
        size = self.shape[self.axis]
        return range(rank * size // self.ranks, (rank + 1) * size // self.ranks)

    def held(self, rank: int) -> int:
        """See ``Layout``."""
        return math.prod(self.part_shape(rank))

    def places(self, rank: int) -> Iterator[int]:
        """See ``Layout``."""
        inner = math.prod(self.shape[self.axis + 1 :])
        own, size = self.range(rank), self.shape[self.axis]
        for outer in range(math.prod(self.shape[: self.axis])):
            for index in own:
                first = (outer * size + index) * inner
                yield from range(first, first + inner)

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """See ``Layout``."""
        axis = self.axis
        return (*self.shape[:axis], len(self.range(rank)), *self.shape[axis + 1 :])

    def part(self, whole: tf.Tensor, rank: int) -> tf.Tensor:
        """See ``Layout``."""
        begin, shape = [0] * len(self.shape), self.part_shape(rank)
        begin[self.axis] = self.range(rank).start
        return tf.reshape(_slice(whole[tf.newaxis], [0, *begin], [1, *shape]), shape)

    def whole(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """See ``Layout``."""
        return tf.concat(parts, self.axis)


@dataclasses.dataclass(frozen=True)
class Repeated(Layout):
    """A layout of the ranks of a team, the same in each team of a grid.

    Args:
        inner: the layout within a team.
        team_ranks: for each rank, its rank in its team; None for a rank of no team, which holds
            nothing.

    Example:
        >>> halves = Split((4, 2), ranks=2, axis=0)
        >>> layout = Repeated.of(halves, team_ranks=(0, 1, 0, 1))
        >>> layout.part_shape(3), list(layout.places(3))
        ((2, 2), [4, 5, 6, 7])
    """

    inner: Layout
    team_ranks: tuple[int | None, ...]
    kind = "repeated"

    @classmethod
    def of(cls, inner: Layout, team_ranks: Sequence[int | None]) -> Repeated:
        """Return the layout of as many ranks as ``team_ranks`` has."""
        return cls(inner.shape, len(team_ranks), inner, tuple(team_ranks))

    @property
    def words(self) -> str:
        """See ``Layout``."""
        teams = self.team_ranks.count(0)
        among = f"among {self.inner.ranks} ranks"
        return f"{self.inner.words} {among}" + (f", in each of {teams} teams" * (teams > 1))

    @property
    def holder(self) -> int | None:
        """The first rank that holds the array, if one rank of each team does."""
        inner = self.inner.holder
        return None if inner is None else self.team_ranks.index(inner)

    def held(self, rank: int) -> int:
        """See ``Layout``."""
        own = self.team_ranks[rank]
        return 0 if own is None else self.inner.held(own)

    def places(self, rank: int) -> Iterator[int]:
        """See ``Layout``."""
        own = self.team_ranks[rank]
        yield from () if own is None else self.inner.places(own)

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """See ``Layout``."""
        own = self.team_ranks[rank]
        return _NOTHING if own is None else self.inner.part_shape(own)

    def part(self, whole: tf.Tensor, rank: int) -> tf.Tensor:
        """See ``Layout``."""
        own = self.team_ranks[rank]
        return tf.zeros(_NOTHING, whole.dtype) if own is None else self.inner.part(whole, own)

    def whole(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """See ``Layout``."""
        first = [self.team_ranks.index(rank) for rank in range(self.inner.ranks)]
        return self.inner.whole([parts[rank] for rank in first])


@dataclasses.dataclass(frozen=True)
class SharedOut(Layout):
    """A layout of which ranks that hold the same part share it out among themselves.

    Args:
        outer: the layout.
        teams: ranks that hold the same part, for each part that ranks hold.
        inners: layout of each team's part among the ranks of the team.

    Example:
        >>> stage = Repeated.of(Owned((6,), 2, owner=1), team_ranks=(0, 1, 0, 1))
        >>> layout = SharedOut.of(stage, [[0, 2], [1, 3]], [Flat((0,), 2), Flat((6,), 2)])
        >>> [list(layout.places(rank)) for rank in range(4)]
        [[], [0, 1, 2], [], [3, 4, 5]]
    """

    outer: Layout
    teams: tuple[tuple[int, ...], ...]
    inners: tuple[Layout, ...]
    kind = "shared out"

    @classmethod
    def of(
        cls, outer: Layout, teams: Sequence[Sequence[int]], inners: Sequence[Layout]
    ) -> SharedOut:
        """Return the layout of all ranks of ``outer``."""
        return cls(outer.shape, outer.ranks, outer, tuple(map(tuple, teams)), tuple(inners))

    def among(self, rank: int) -> tuple[Layout, int]:
        """Return how the part that a rank's team holds is shared out, and the rank in the team."""
        place = next(i for i, team in enumerate(self.teams) if rank in team)
        return self.inners[place], self.teams[place].index(rank)

    @property
    def words(self) -> str:
        """See ``Layout``."""
        twins = len(self.teams[0])
        return self.outer.words + f", shared out among {twins} ranks" * (twins > 1)

    @property
    def holder(self) -> int | None:
        """See ``Layout``."""
        if self.outer.holder is None:
            return None
        inner, _ = self.among(self.outer.holder)
        team = next(team for team in self.teams if self.outer.holder in team)
        return None if inner.holder is None else team[inner.holder]

    def held(self, rank: int) -> int:
        """See ``Layout``."""
        inner, own = self.among(rank)
        return inner.held(own)

    def places(self, rank: int) -> Iterator[int]:
        """See ``Layout``."""
        inner, own = self.among(rank)
        every = list(self.outer.places(rank))
        yield from (every[place] for place in inner.places(own))

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """See ``Layout``."""
        inner, own = self.among(rank)
        return inner.part_shape(own)

    def part(self, whole: tf.Tensor, rank: int) -> tf.Tensor:
        """See ``Layout``."""
        return self.share(self.outer.part(whole, rank), rank)

    def view(self, held: tf.Tensor, rank: int) -> tf.Tensor:
        """See ``Layout``."""
        inner, own = self.among(rank)
        return inner.view(held, own)

    def share(self, part: tf.Tensor, rank: int) -> tf.Tensor:
        """Return a rank's share of the part that its team holds."""
        inner, own = self.among(rank)
        return inner.part(part, own)

    def whole(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """See ``Layout``."""
        of_ranks = {
            rank: part
            for team, inner in zip(self.teams, self.inners, strict=True)
            for part in [inner.whole([parts[rank] for rank in team])]
            for rank in team
        }
        return self.outer.whole([of_ranks[rank] for rank in range(self.ranks)])


def _slice(x: tf.Tensor, begin: Sequence[int], size: Sequence[int]) -> tf.Tensor:
    """Return a slice that is not along the first axis only: so it has memory of its own.

    A slice along the first axis shares the memory of the whole tensor, which a variable that is
    assigned the slice would keep. TensorFlow's op for copies runs one at a time in a graph, so that
    replicas that exchange parts would wait for each other.
    """
    return tf.slice(x, begin, size)


def verify(layout: Layout) -> None:
    """Raise unless equally many ranks hold each number, and the shapes of parts suit.

    Example:
        >>> verify(Flat((10,), ranks=4))
    """
    holders = collections.Counter(
        place for rank in range(layout.ranks) for place in layout.places(rank)
    )
    times = {holders[place] for place in range(layout.numbers)}
    if holders.total() and (len(times) > 1 or 0 in times or len(holders) != layout.numbers):
        raise ValueError(
            f"{layout}: {sorted(times)} ranks hold a number; expected the same for each number"
        )
    for rank in range(layout.ranks):
        held, room = layout.held(rank), math.prod(layout.part_shape(rank))
        if sum(1 for _ in layout.places(rank)) != held or held > room:
            raise ValueError(f"{layout}: rank {rank} holds {held} numbers in {room} places")
