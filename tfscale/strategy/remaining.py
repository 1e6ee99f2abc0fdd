"""Workers with other numbers of batches: who has none left takes part until nobody has any."""

from __future__ import annotations

import tensorflow as tf

from tfscale.exchange.trial import Cell


class Remaining:
    """Whether this worker has batches left, and whether any has, as far as this one knows."""

    def __init__(self) -> None:
        self._left, self._more = Cell(tf.int64), Cell(tf.bool)
        self._left.assign(1)
        self._more.assign(True)

    def counted(self, here: tf.Tensor) -> tf.Tensor:
        """How many replicas get a batch in the next step, as far as this worker knows.

        A worker without batches takes part in the ends of others' rounds, until none has any.

        Args:
            here: how many of this worker's do.
        """
        more, left = self._more.read(), tf.reduce_sum(here)
        found = tf.where(more, tf.maximum(here, 1), here)
        over = tf.reduce_sum(found) == 0  # and the next epoch has some again
        self._left.assign(tf.where(over, tf.ones_like(left), left))
        self._more.assign(tf.logical_or(more, over))
        return found

    def here(self) -> tf.Tensor:
        """How many of this worker's replicas have got a batch in this step."""
        return tf.cast(self._left.read(), tf.int32)

    def is_none_here(self) -> tf.Tensor:
        """Whether this worker has none left."""
        return self._left.read() == 0

    def agree(self, every: tf.Tensor) -> None:
        """Take what all replicas say that ``here`` is."""
        self._more.assign(tf.reduce_any(every > 0))
