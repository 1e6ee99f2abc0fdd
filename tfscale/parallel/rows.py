"""Parts of gradients of tables, which are rows with their places in the table."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfscale.exchange.rows import is_rows
from tfscale.parallel.layout import Flat, Layout, Split


def part_of_total(total: Any, layout: Layout, rank: int) -> Any:
    """Return a rank's part of a sum, dense or of rows."""
    return part_of_rows(total, layout, rank) if is_rows(total) else layout.part(total, rank)


def part_of_rows(total: Any, layout: Layout, rank: int) -> Any:
    """Return a rank's part of a sum of rows; anything else stays as it is."""
    if not is_rows(total):
        return total
    if isinstance(layout, Flat):
        return _numbers(total, layout, rank)
    if isinstance(layout, Split):
        return _slice(total, layout, rank)
    return total if layout.held(rank) else tf.zeros([0], total.dtype)


def _numbers(rows: tf.IndexedSlices, layout: Flat, rank: int) -> tf.IndexedSlices:
    """Return the numbers of rows that a flat part holds, with their places in the part."""
    own, width = layout.range(rank), layout.numbers // layout.shape[0]
    first = tf.cast(rows.indices, tf.int64)[:, tf.newaxis] * width
    places = tf.reshape(first + tf.range(width, dtype=tf.int64), [-1])
    held = tf.logical_and(places >= own.start, places < own.stop)
    values = tf.boolean_mask(tf.reshape(rows.values, [-1]), held)
    places = tf.boolean_mask(places, held) - own.start
    return tf.IndexedSlices(values, places, tf.constant([layout.size], tf.int64))


def _slice(rows: tf.IndexedSlices, layout: Split, rank: int) -> tf.IndexedSlices:
    """Return the rows that a slice of a table holds, or a slice of each row."""
    own, shape = layout.range(rank), tf.constant(layout.part_shape(rank), tf.int64)
    indices = tf.cast(rows.indices, tf.int64)
    if layout.axis > 0:
        begin = [0] * len(layout.shape)
        begin[layout.axis] = own.start
        size = [-1, *layout.part_shape(rank)[1:]]
        return tf.IndexedSlices(tf.slice(rows.values, begin, size), indices, shape)
    held = tf.logical_and(indices >= own.start, indices < own.stop)
    values = tf.boolean_mask(rows.values, held)
    return tf.IndexedSlices(values, tf.boolean_mask(indices, held) - own.start, shape)
