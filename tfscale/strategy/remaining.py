"""Workers with different numbers of batches.

A worker that has run out of batches keeps taking part until all workers have.
"""

from __future__ import annotations

import tensorflow as tf

from tfscale.native.cell import Cell


class Remaining:
    """State of one worker: whether it has batches left, and whether it knows of others that do."""

    def __init__(self) -> None:
        self._left, self._more = Cell(tf.int64), Cell(tf.bool)
        self._left.assign(1)
        self._more.assign(True)

    def counted(self, here: tf.Tensor) -> tf.Tensor:
        """Return how many replicas get a batch in the next step, as far as this worker knows.

        A worker without batches takes part in the ends of rounds until no worker has batches left.

        Args:
            here: number of this worker's replicas that get a batch.
        """
        more, left = self._more.read(), tf.reduce_sum(here)
        found = tf.where(more, tf.maximum(here, 1), here)
        over = tf.reduce_sum(found) == 0  # the next epoch has batches again
        self._left.assign(tf.where(over, tf.ones_like(left), left))
        self._more.assign(tf.logical_or(more, over))
        return found

    def here(self) -> tf.Tensor:
        """Return how many of this worker's replicas have got a batch in this step."""
        return tf.cast(self._left.read(), tf.int32)

    def is_none_here(self) -> tf.Tensor:
        """Return whether this worker has no batches left."""
        return self._left.read() == 0

    def agree(self, every: tf.Tensor) -> None:
        """Note whether any worker has batches left.

        Args:
            every: values of ``here`` of all replicas.
        """
        self._more.assign(tf.reduce_any(every > 0))
