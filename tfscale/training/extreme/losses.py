"""The loss and metrics of samples that have several labels."""

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
        return self._loss.call(_rows(y_true, y_pred, self._buckets), y_pred)


class MultiHotMetric(keras.metrics.Metric):
    """A metric of rows of zeros and ones, for rows of buckets that are filled up with -1.

    Args:
        metric: a metric of Keras that takes zeros and ones.
        buckets: number of buckets.
    """

    def __init__(self, metric: keras.metrics.Metric, buckets: int) -> None:
        super().__init__(name=metric.name)
        self._metric, self._buckets = metric, buckets

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count a batch."""
        self._metric.update_state(_rows(y_true, y_pred, self._buckets), y_pred, sample_weight)

    def result(self) -> Any:
        """Return the metric's result."""
        return self._metric.result()

    def reset_state(self) -> None:
        """Forget all batches."""
        self._metric.reset_state()


def _rows(places: tf.Tensor, like: tf.Tensor, buckets: int) -> tf.Tensor:
    """Return rows of zeros and ones with the shape and the type of a model's outputs."""
    rows = multi_hot(tf.reshape(places, [-1, tf.shape(places)[-1]]), buckets)
    return tf.reshape(tf.cast(rows, like.dtype), tf.shape(like))


def multi_hot(places: tf.Tensor, width: int) -> tf.Tensor:
    """Return rows of zeros and ones [samples, width] from places [samples, n]; -1 is none."""
    columns = tf.cast(places, tf.int32)
    columns = tf.where(columns < 0, width, columns)
    rows = tf.broadcast_to(tf.range(tf.shape(columns)[0])[:, None], tf.shape(columns))
    counts = tf.scatter_nd(
        tf.stack([rows, columns], -1), tf.ones_like(columns), [tf.shape(columns)[0], width + 1]
    )
    return tf.cast(counts[:, :-1] > 0, tf.float32)
