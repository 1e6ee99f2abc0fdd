"""The k best classes of each sample, exactly, without a matrix of classes times samples.

For sums of values there is a search in C++ (``native/search.py``). SavedModels, other estimators
and machines without the native library use TensorFlow's operations, in one of two ways:

``all_classes`` scores all classes, a block at a time, and keeps the k best of each sample.
``best_buckets`` scores only the classes in the m best buckets of each repetition. A class that is
in none of them scores at most what the next best buckets would give it, so for most samples k
classes are proven to be the best (the threshold algorithm of Fagin, Lotem and Naor, 2001).
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.native import library, search
from tfscale.training.extreme.estimators import combined, is_sum, scaled

_ELEMENTS = 1 << 22  # largest number of values that a block holds, 16 MB
_ROWS = 64  # samples at a time
_CANDIDATES = 4  # buckets of each repetition that a search looks into first
_LARGE = 1 << 18  # classes times repetitions, from which on the library is worth its loading


class Search:
    """The hash tables of some repetitions, and the search for the best classes.

    Args:
        table: the bucket of each class in each repetition, as integers [repetitions, classes].
        buckets: number of buckets.
        estimator: one of ``ESTIMATORS``.
    """

    def __init__(self, table: Any, buckets: int, estimator: str) -> None:
        self.repetitions, self.classes = table.shape
        self.buckets, self.estimator = buckets, estimator
        offsets = buckets * np.arange(self.repetitions, dtype=np.int32)
        with tf.device("CPU:0"):
            # The place of each class's buckets among all buckets of all repetitions.
            self._places = tf.constant(np.ascontiguousarray(table.T + offsets))
        self._members: tf.Tensor | None = None
        self._functions: dict[tuple[Any, ...], Any] = {}

    def top(self, values: tf.Tensor, k: int, candidates: int | None = None) -> tuple[Any, Any]:
        """Return scores and classes [samples, k], best first; equal scores by class.

        Args:
            values: values of buckets [repetitions, samples, buckets].
            k: number of classes for each sample.
            candidates: number of buckets per repetition to look into first, by TensorFlow's
                operations; 0 looks at all classes. None takes the fastest search that there is.
        """
        if candidates is None and obstacle(self.classes, self.repetitions, self.estimator) is None:
            scores, labels = self._native(values, k)
        else:
            if candidates is None:
                candidates = self.candidates()
            scores, labels = self._traced(self.best, k, candidates)(values)
        return scores.numpy(), labels.numpy()

    def _native(self, values: tf.Tensor, k: int) -> tuple[Any, Any]:
        with tf.device("CPU:0"):
            sums, labels = search.best_classes(values, self._places, k)
            return self._found(sums), labels

    def candidates(self) -> int:
        """Return how many buckets of each repetition to look into first; 0 for all classes."""
        load = self.classes / self.buckets
        fullest = load + 4 * load**0.5  # nearly the largest number of classes of a bucket
        work = self.repetitions * _CANDIDATES * fullest
        return _CANDIDATES if 4 * work <= self.classes else 0

    def best(self, values: tf.Tensor, k: int, candidates: int) -> tuple[Any, Any]:
        """Return what ``top`` returns, as tensors, within a graph; some samples at a time."""
        if not 0 < candidates < self.buckets:
            return self._in_parts(values, lambda part: self.all_classes(part, k))
        if self._members is None:
            with tf.init_scope():
                self._members = self._inverted()
        return self._in_parts(values, lambda part: self._by_candidates(part, k, candidates))

    def _in_parts(self, values: tf.Tensor, find: Any) -> tuple[Any, Any]:
        """Search for some samples at a time, so that the memory does not depend on their number."""
        parts = tf.maximum((tf.shape(values)[1] + _ROWS - 1) // _ROWS, 1)

        def more(part: Any, scores: Any, labels: Any) -> tuple[Any, Any, Any]:
            found = find(values[:, part * _ROWS : (part + 1) * _ROWS])
            return part + 1, scores.write(part, found[0]), labels.write(part, found[1])

        arrays = [tf.TensorArray(kind, parts, infer_shape=False) for kind in (tf.float32, tf.int32)]
        _, scores, labels = tf.while_loop(
            lambda part, *_: part < parts, more, (0, *arrays), parallel_iterations=1
        )
        return scores.concat(), labels.concat()

    def _by_candidates(self, values: tf.Tensor, k: int, candidates: int) -> tuple[Any, Any]:
        """Search in the best buckets, and in all classes where that proves nothing."""
        scores, labels, proven = self._best_buckets(values, k, candidates)

        def mended() -> tuple[Any, Any]:
            open_rows = tf.where(~proven)
            others = self.all_classes(tf.gather(values, open_rows[:, 0], axis=1), k)
            return (
                tf.tensor_scatter_nd_update(scores, open_rows, others[0]),
                tf.tensor_scatter_nd_update(labels, open_rows, others[1]),
            )

        return tf.cond(tf.reduce_all(proven), lambda: (scores, labels), mended)  # type: ignore[no-any-return]

    def _traced(self, find: Any, *numbers: int) -> Any:
        """Return a function of values that is traced once for any number of samples."""
        key = find.__name__, *numbers
        if key not in self._functions:
            shape = tf.TensorSpec([self.repetitions, None, self.buckets])
            function = tf.function(lambda values: find(values, *numbers), autograph=False)
            self._functions[key] = function.get_concrete_function(shape)
        return self._functions[key]

    def scores_of(self, values: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Return scores of given classes [samples, n], from values as ``top`` takes them."""
        by_sample = tf.reshape(tf.transpose(values, [1, 0, 2]), [tf.shape(values)[1], -1])
        picked = tf.gather(by_sample, tf.gather(self._places, labels), batch_dims=1)
        return self._scaled(combined(picked, self.estimator))

    def _found(self, scores: tf.Tensor) -> tf.Tensor:
        """Return scores of the best classes; NaN where there is no number that is the best."""
        none = tf.cast(float("nan"), scores.dtype)
        return self._scaled(tf.where(scores > tf.float32.min, scores, none))

    def _scaled(self, scores: tf.Tensor) -> tf.Tensor:
        return scaled(scores, self.estimator, self.buckets, self.repetitions)

    def all_classes(self, values: tf.Tensor, k: int) -> tuple[Any, Any]:
        """Return scores and classes of the k best among all, within a graph."""
        samples = tf.shape(values)[1]
        by_bucket = tf.reshape(tf.transpose(values, [0, 2, 1]), [-1, samples])
        width = 1 if is_sum(self.estimator) else self.repetitions
        block = tf.clip_by_value(_ELEMENTS // (width * tf.maximum(samples, 1)), k, self.classes)

        def more(begin: Any, scores: Any, labels: Any) -> tuple[Any, Any, Any]:
            end = tf.minimum(begin + block, self.classes)
            new = self._block(by_bucket, begin, end)
            new, places = tf.math.top_k(new, tf.minimum(k, end - begin))
            scores, labels = tf.concat([scores, new], 1), tf.concat([labels, places + begin], 1)
            scores, kept = tf.math.top_k(scores, k)  # equal ones: the first, so the lower class
            return end, scores, tf.gather(labels, kept, batch_dims=1)

        none = tf.fill([samples, k], tf.float32.min), tf.zeros([samples, k], tf.int32)
        shapes = (tf.TensorShape([]), *[tf.TensorShape([None, None])] * 2)
        _, scores, labels = tf.while_loop(
            lambda begin, *_: begin < self.classes, more, (0, *none), shapes, parallel_iterations=2
        )
        return self._found(scores), labels

    def _block(self, by_bucket: tf.Tensor, begin: Any, end: Any) -> tf.Tensor:
        """Return scores [samples, classes] of the classes from ``begin`` to ``end``."""
        places = self._places[begin:end]
        if not is_sum(self.estimator):
            return combined(tf.transpose(tf.gather(by_bucket, places), [2, 0, 1]), self.estimator)
        segments = tf.repeat(tf.range(end - begin), self.repetitions)
        sums = tf.raw_ops.SparseSegmentSum(
            data=by_bucket, indices=tf.reshape(places, [-1]), segment_ids=segments
        )
        return tf.transpose(sums)

    def _best_buckets(self, values: Any, k: int, candidates: int) -> tuple[Any, Any, Any]:
        """Return scores and classes from the best buckets, and for which samples they are best."""
        samples = tf.shape(values)[1]
        best, places = tf.math.top_k(values, candidates + 1)
        offsets = self.buckets * tf.range(self.repetitions)[:, None, None]
        taken = tf.transpose(places[:, :, :candidates] + offsets, [1, 0, 2])
        classes = tf.reshape(tf.gather(self._members, taken), [samples, -1])
        classes = tf.pad(_without_copies(classes), [[0, 0], [0, k]], constant_values=-1)
        scores = self.scores_of(values, tf.maximum(classes, 0))
        scores = tf.where(classes >= 0, scores, tf.float32.min)
        scores, kept = tf.math.top_k(scores, k)
        limit = self._scaled(combined(tf.transpose(best[:, :, -1]), self.estimator))
        # A sum in another order may differ in the last bits, which must not prove too much.
        margin = 1e-5 * tf.maximum(tf.abs(limit), 1e-3)
        return scores, tf.gather(classes, kept, batch_dims=1), scores[:, -1] > limit + margin

    def _inverted(self) -> tf.Tensor:
        """Return the classes of each bucket of each repetition, in rows filled up with -1."""
        places = self._places.numpy()
        rows = self.repetitions * self.buckets
        counts = np.bincount(places.ravel(), minlength=rows)
        members = np.full([rows, max(counts)], -1, np.int32)
        for column in places.T:
            order = np.argsort(column, kind="stable")
            present = column[order]
            members[present, np.arange(len(order)) - np.searchsorted(present, present)] = order
        with tf.device("CPU:0"):
            return tf.constant(members)


def obstacle(classes: int, repetitions: int, estimator: str) -> str | None:
    """Return why TensorFlow's operations search, and not those in C++; None if C++ does.

    If there is no native library, a warning says so once.
    """
    if classes * repetitions < _LARGE:
        return "classes are so few that the library need not be loaded"
    if not is_sum(estimator):
        return f"scores by {estimator!r} are no sums"
    if repetitions > search.MOST_REPETITIONS:
        return f"repetitions are more than {search.MOST_REPETITIONS}"
    if trouble := library.trouble():
        _warn_once(trouble)
        return f"there is no native library: {trouble.splitlines()[0]}"
    return None


@functools.cache
def _warn_once(trouble: str) -> None:
    logging.getLogger("tfscale").warning(
        "there is no native library, so TensorFlow's operations search for the best classes. They "
        "find the same, and can be several times slower: %s",
        trouble,
    )


def _without_copies(classes: tf.Tensor) -> tf.Tensor:
    """Return the classes of each sample in order, with -1 instead of the second of two equal."""
    ordered = tf.sort(classes, axis=1)
    same = tf.pad(ordered[:, 1:] == ordered[:, :-1], [[0, 0], [1, 0]])
    return tf.where(same, -1, ordered)
