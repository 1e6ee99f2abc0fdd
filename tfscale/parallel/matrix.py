"""Several arrays as one matrix, whose row r is what rank r holds of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfscale.parallel.layout import Flat, Layout


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Arrays of one type as a matrix of one row for each rank, so that a collective moves them all.

    All layouts must be ``Flat``, or none. Rows are as long as the longest needs.

    Args:
        layouts: layouts of the arrays, of the same ranks.
    """

    layouts: tuple[Layout, ...]

    @property
    def ranks(self) -> int:
        """Number of rows."""
        return self.layouts[0].ranks

    @property
    def columns(self) -> int:
        """Number of columns."""
        return max(sum(self._sizes(rank)) for rank in range(self.ranks))

    def _sizes(self, rank: int) -> list[int]:
        return [tf.TensorShape(each.part_shape(rank)).num_elements() for each in self.layouts]

    def of_wholes(self, arrays: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the matrix of whole arrays."""
        flat = [each for each in self.layouts if isinstance(each, Flat)]
        if flat:
            return tf.concat([one.rows(x) for one, x in zip(flat, arrays, strict=True)], 1)
        rows = [
            self.row([one.part(x, rank) for one, x in zip(self.layouts, arrays, strict=True)])
            for rank in range(self.ranks)
        ]
        return tf.concat(rows, 0)

    def row(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the row of one rank, as a matrix, from the rank's parts of all arrays."""
        joined = tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
        missing = self.columns - joined.shape[0]
        return (tf.pad(joined, [[0, missing]]) if missing else joined)[tf.newaxis]

    def parts(self, row: tf.Tensor, rank: int) -> list[tf.Tensor]:
        """Return the parts of all arrays that a rank holds, from its row."""
        sizes = self._sizes(rank)
        found = tf.split(tf.reshape(row, [-1])[: sum(sizes)], sizes)
        return [
            tf.reshape(part, each.part_shape(rank))
            for part, each in zip(found, self.layouts, strict=True)
        ]

    def wholes(self, matrix: tf.Tensor) -> list[tf.Tensor]:
        """Return the whole arrays from the matrix."""
        if isinstance(self.layouts[0], Flat):
            columns = tf.split(matrix, self._sizes(0), 1)
            return [one.whole(x) for one, x in zip(self.layouts, columns, strict=True)]
        every = [self.parts(matrix[rank], rank) for rank in range(self.ranks)]
        return [
            one.whole([parts[place] for parts in every]) for place, one in enumerate(self.layouts)
        ]
