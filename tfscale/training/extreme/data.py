"""Data for ``fit``, with buckets in place of labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.training.extreme.labels import Labels

_KINDS = "arrays, a tf.data.Dataset, a keras.utils.PyDataset or a generator of (x, y)"


class BucketLabels:
    """Replaces the labels of data by buckets, in each form of data that ``fit`` takes.

    Args:
        labels: the classes.
        table: the bucket of each class [repetitions, classes].
        stacked: whether a sample gets the buckets of all repetitions, or those of the only one.
        class_weight: None, or a dict from labels to weights, which multiply sample weights.
    """

    def __init__(self, labels: Labels, table: Any, stacked: bool, class_weight: Any) -> None:
        self._labels, self._stacked = labels, stacked
        with tf.device("CPU:0"):
            self._table = tf.constant(table)
        if class_weight and labels.multilabel:
            raise ValueError(
                "class_weight is for samples of one label each; got it with multilabel=True. "
                "Give sample_weight"
            )
        self._weights = labels.weights(class_weight) if class_weight else None

    def data(self, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        """Return ``x``, ``y`` and ``sample_weight`` as ``keras.Model.fit`` takes them."""
        if y is not None:
            y, sample_weight = self._of_batch(y, sample_weight)
            return x, np.asarray(y), None if sample_weight is None else np.asarray(sample_weight)
        if isinstance(x, tf.data.Dataset):
            return x.map(self._of_element, num_parallel_calls=tf.data.AUTOTUNE), None, None
        if isinstance(x, keras.utils.PyDataset):
            return _Mapped(x, self._of_arrays), None, None
        check_labels(x, y)
        return self._generated(x), None, None

    def _of_batch(self, y: Any, sample_weight: Any) -> tuple[Any, Any]:
        ids = self._labels.ids(y)
        sample_weight = self._weight(ids, sample_weight)
        buckets = tf.gather(self._table, tf.maximum(ids, 0), axis=1)
        buckets = tf.where(ids < 0, -1, buckets)
        if not self._stacked:
            return buckets[0], sample_weight
        return tf.transpose(buckets, [1, 0, 2][: 1 + ids.shape.rank]), sample_weight

    def _weight(self, ids: Any, sample_weight: Any) -> Any:
        """Return the weight of each sample, for each of its repetitions; None if all weigh 1."""
        if sample_weight is not None:
            sample_weight = tf.reshape(tf.cast(sample_weight, tf.float32), [-1])
        if self._weights is not None:
            of_class = tf.gather(self._weights, ids)
            sample_weight = of_class if sample_weight is None else of_class * sample_weight
        if sample_weight is None or not self._stacked:
            return sample_weight
        return tf.repeat(sample_weight[:, None], self._table.shape[0], axis=1)

    def _of_element(self, *element: Any) -> tuple[Any, ...]:
        x, y, *weight = _checked(element)
        y, weight = self._of_batch(y, weight[0] if weight else None)
        return (x, y) if weight is None else (x, y, weight)

    def _of_arrays(self, batch: Any) -> tuple[Any, ...]:
        x, *others = self._of_element(*(batch if isinstance(batch, (tuple, list)) else (batch,)))
        return x, *(np.asarray(other) for other in others)

    def _generated(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from map(self._of_arrays, batches)


class _Mapped(keras.utils.PyDataset):
    """A PyDataset whose batches a function changes.

    Its workers are threads, for processes would copy TensorFlow's tables.
    """

    def __init__(self, dataset: Any, function: Any) -> None:
        super().__init__(workers=dataset.workers, max_queue_size=dataset.max_queue_size)
        self._dataset, self._function = dataset, function

    @property
    def num_batches(self) -> Any:
        """Number of batches; None if they have no end."""
        return self._dataset.num_batches

    def __getitem__(self, index: int) -> Any:
        return self._function(self._dataset[index])

    def on_epoch_begin(self) -> None:
        """Tell the user's dataset."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tell the user's dataset."""
        self._dataset.on_epoch_end()


def check_labels(x: Any, y: Any) -> None:
    """Raise if labels are neither in ``y`` nor in data that gives them."""
    gives = isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)) or hasattr(x, "__next__")
    if y is None and not gives:
        raise ValueError(f"x is {_KINDS}, and arrays need y; got {type(x).__name__} without y")


def _checked(element: Any) -> Any:
    if len(element) in (2, 3):
        return element
    raise ValueError(f"data gives (x, y) or (x, y, sample_weight); got {len(element)} parts")
