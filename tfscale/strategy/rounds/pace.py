"""The pace of a replica: which batches it leaves out, so that others need not wait for it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfscale.native.cell import make_cell
from tfscale.strategy.batch.rows import is_batch, rows_unless

_GAIN = 0.05  # slow enough for news that are as old as the largest bounds
_NOISE = 0.05  # of a step: shorter waits are not worth a batch
_MOST = 0.95  # share of the batches that a replica leaves out at most


class Pace:
    """Decides which batches a replica leaves out.

    An integral controller: the share of batches that the replica leaves out grows while the others
    wait longer than the replica does, and shrinks while they wait less. In a step without its batch
    the replica computes on one placeholder row, and adds nothing to the sum.

    Args:
        host: device that holds the state.

    Attributes:
        skipped: number of batches that have been left out.
    """

    def __init__(self, host: str) -> None:
        self._skips = make_cell(host, tf.bool, False)
        self._share, self._phase, self._full, self._ended = (
            make_cell(host, tf.float64, 0) for _ in range(4)
        )
        self.skipped = make_cell(host, tf.int64, 0)

    def thinned(self, data: Any) -> Any:
        """Return the replica's part of a batch, without rows if it leaves the batch out."""
        skips = self._skips.read()
        return tf.nest.map_structure(lambda x: rows_unless(skips, x) if is_batch(x) else x, data)

    def begun(self, now: tf.Tensor) -> None:
        """Note that the step's gradients are there, and decide on the next batch.

        Args:
            now: the present moment, in seconds.
        """
        skips, ended, full = self._skips.read(), self._ended.read(), self._full.read()
        took = tf.where(ended > 0, now - ended, tf.zeros_like(now))
        mean = tf.where(full > 0, (full + took) / 2, took)
        self._full.assign(tf.where(skips, full, mean))
        self.skipped.assign(self.skipped.read() + tf.cast(skips, tf.int64))
        phase = self._phase.read() + self._share.read()
        self._skips.assign(phase >= 1)
        self._phase.assign(tf.where(phase >= 1, phase - 1, phase))

    def compare(self, own: tf.Tensor, others: tf.Tensor) -> None:
        """Adjust the share of batches to leave out.

        Args:
            own: seconds that this replica has waited for a sum.
            others: seconds that the others have waited, on average.
        """
        error = tf.math.divide_no_nan(others - own, self._full.read())
        error = tf.where(tf.abs(error) < _NOISE, tf.zeros_like(error), error)
        share = self._share.read() + _GAIN * tf.clip_by_value(error, -1.0, 1.0)
        self._share.assign(tf.clip_by_value(share, 0.0, _MOST))

    def ended(self, now: tf.Tensor) -> None:
        """Note that a step has ended, at a moment in seconds."""
        self._ended.assign(now)
