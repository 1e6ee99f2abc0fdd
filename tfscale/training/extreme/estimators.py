"""Estimators: a class's score from the values of its buckets, one value per repetition.

A bucket's probability is the sum of those of its classes. If a class has the probability p, its
bucket has ``p + (1 - p) / B`` on average over the hash functions, so ``(mean - 1/B) B / (B - 1)``
is unbiased. All estimators are monotone: no score falls if a bucket's value rises.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

UNBIASED, MEAN, MIN, MEDIAN, LOGITS = ESTIMATORS = ("unbiased", "mean", "min", "median", "logits")


def values_of(logits: tf.Tensor, estimator: str, multilabel: bool) -> tf.Tensor:
    """Return what an estimator combines: probabilities of buckets, or the logits themselves."""
    logits = tf.cast(logits, tf.float32)
    if estimator == LOGITS:
        return logits
    return tf.sigmoid(logits) if multilabel else tf.nn.softmax(logits)


def is_sum(estimator: str) -> bool:
    """Return whether the order of scores is the order of sums over repetitions."""
    return estimator in (UNBIASED, MEAN, LOGITS)


def combined(values: Any, estimator: str) -> tf.Tensor:
    """Return scores before ``scaled``, from values whose last axis counts the repetitions."""
    if is_sum(estimator):
        return tf.reduce_sum(values, axis=-1)
    if estimator == MIN:
        return tf.reduce_min(values, axis=-1)
    ordered, count = tf.sort(values, axis=-1), values.shape[-1]
    median = (ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2
    return median + 0 * tf.reduce_sum(values, axis=-1)  # NaN has no place in an order


def scaled(scores: tf.Tensor, estimator: str, buckets: int, repetitions: int) -> tf.Tensor:
    """Return sums as means, or as unbiased estimates; other scores stay as they are."""
    if estimator == MEAN:
        return scores / repetitions
    if estimator == UNBIASED:
        return (scores / repetitions - 1 / buckets) * (buckets / (buckets - 1))
    return scores
