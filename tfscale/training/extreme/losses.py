"""The loss of samples that have several labels."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


class MultiHot(keras.losses.Loss):
    """A loss of rows of zeros and ones, for rows of buckets that are filled up with -1.

    Two labels of a sample in one bucket are one. The rows of a batch exist only in its step.

    Args:
        loss: a loss of Keras that takes zeros and ones.
        buckets: number of buckets.
    """

    def __init__(self, loss: keras.losses.Loss, buckets: int) -> None:
        super().__init__(name=loss.name, reduction=loss.reduction)
        self._loss, self._buckets = loss, buckets

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the loss of each sample."""
        shape = tf.concat([tf.shape(y_true)[:-1], [self._buckets]], 0)
        rows = multi_hot(tf.reshape(y_true, [-1, tf.shape(y_true)[-1]]), self._buckets)
        return self._loss.call(tf.cast(tf.reshape(rows, shape), y_pred.dtype), y_pred)


def multi_hot(places: tf.Tensor, width: int) -> tf.Tensor:
    """Return rows of zeros and ones [samples, width] from places [samples, n]; -1 is none."""
    columns = tf.cast(places, tf.int32)
    columns = tf.where(columns < 0, width, columns)
    rows = tf.broadcast_to(tf.range(tf.shape(columns)[0])[:, None], tf.shape(columns))
    counts = tf.scatter_nd(
        tf.stack([rows, columns], -1), tf.ones_like(columns), [tf.shape(columns)[0], width + 1]
    )
    return tf.cast(counts[:, :-1] > 0, tf.float32)
