"""Sums of sparse tensors: of rows of a table, such as the gradient of an embedding.

To join rows, a rank receives the rows of all ranks, P times as many as its own; a dense sum sends
twice the dense tensor. A single device would have the joined rows, and some optimizers treat two
rows differently from their sum. So rows are joined even if that costs somewhat more, and whenever
they are few bytes.

A residual of the table's shape holds, for each row, the errors of earlier steps. They are added to
the rows that are sent, and the new errors of these rows replace them. Rows that occur twice are
added up first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.collectives.wires import LOSSLESS
from tfscale.exchange import lookups
from tfscale.exchange.team import Team
from tfscale.native.bucket import Name, bucket_id

# Joined rows may have at most this many times the bytes of a dense sum.
JOIN_UP_TO = 4

# Up to this many bytes, rows are always joined: they cost little more than any message does.
JOIN_ALWAYS = 1 << 18


def is_rows(gradient: Any) -> bool:
    """Return whether a gradient is rows of a table, with their places."""
    return isinstance(gradient, tf.IndexedSlices)


def numbers_of(gradient: Any) -> tf.Tensor:
    """Return the numbers of a gradient, dense or of rows."""
    return gradient.values if is_rows(gradient) else gradient


def with_numbers(gradient: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Return a gradient, dense or of rows, with what ``change`` makes of its numbers."""
    if not is_rows(gradient):
        return change(gradient)
    return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)


def sum_all(
    team: Team,
    replica: int,
    values: Sequence[Any],
    name: Name,
    sum_of_rows: Callable[..., tf.IndexedSlices] | None = None,
) -> list[Any]:
    """Return the sums of tensors and ``IndexedSlices``, in the precision of their types.

    Args:
        team: team of the replicas.
        replica: index of the replica in this process.
        values: tensors and ``IndexedSlices``.
        name: name of the buckets.
        sum_of_rows: ``sum_rows``, which is the default, or ``sum_as_one_device``.
    """
    totals = iter(team.sum_all(replica, [x for x in values if not is_rows(x)], name))
    add = sum_of_rows or sum_rows
    return [add(team, replica, x, name) if is_rows(x) else next(totals) for x in values]


def sum_as_one_device(
    team: Team, replica: int, slices: tf.IndexedSlices, name: Name, *how: Any
) -> tf.IndexedSlices:
    """Return the sum of rows that one device would have for the samples of all replicas.

    Rows that a layer has made unique are unique in the sum, too.

    Args:
        team: team of the replicas.
        replica: index of the replica in this process.
        slices: gradient of a table.
        name: name of the bucket.
        how: wire, seed and residual, as for ``sum_rows``.
    """
    add = sum_equal_rows if lookups.are_of_all_samples(slices.indices) else sum_rows
    total = add(team, replica, slices, name, *how)
    return with_unique_rows(total) if lookups.are_unique(slices.indices) else total


def sum_of_microbatches(parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Return the sum of the gradients of microbatches: the rows that one batch would have.

    Rows stay apart, since optimizers and norms treat two gradients of one row differently from
    their sum. See lookups.py for rows that must be added.

    Args:
        parts: gradients of one table, of which each is traced in the same way.
    """
    first = parts[0]
    if lookups.are_of_all_samples(first.indices):
        values = tf.add_n([x.values for x in parts])
        return tf.IndexedSlices(values, first.indices, first.dense_shape)
    joined = joined_rows(parts)
    return with_unique_rows(joined) if lookups.are_unique(first.indices) else joined


def joined_rows(parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Return the rows of several gradients of one table."""
    if len(parts) == 1:
        return parts[0]
    values = tf.concat([x.values for x in parts], 0)
    indices = tf.concat([x.indices for x in parts], 0)
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def sum_rows(
    team: Team,
    replica: int,
    slices: tf.IndexedSlices,
    name: Name,
    wire: str = LOSSLESS,
    seed: Any = 0,
    lost: tf.Variable | None = None,
) -> tf.IndexedSlices:
    """Return the sum of rows: joined rows, or a dense sum if joining costs far more.

    Args:
        team: team of the replicas.
        replica: index of the replica in this process.
        slices: rows of a table.
        name: name of the bucket.
        wire: the format in which rows are sent.
        seed: seed for wires that round at random.
        lost: residual of the table; None if later steps do not send what is lost.
    """
    if team.size == 1:
        return slices
    dtype = slices.dtype
    if lost is not None:
        slices = _to_remember(slices, lost)
    counts = team.count_rows(replica, slices.indices, name)
    if slices.dense_shape is None:
        raise ValueError(
            f"the sparse gradient of {bucket_id(name).label!r} has no dense_shape, so it "
            "cannot be summed over replicas. Pass dense_shape to tf.IndexedSlices: the shape of "
            "the variable"
        )
    height = tf.cast(slices.dense_shape[0], tf.int64)

    def join() -> tuple[tf.Tensor, tf.Tensor]:
        indices = team.join(replica, slices.indices, counts, name)
        if lost is None:
            return team.join(replica, slices.values, counts, name, wire=wire, seed=seed), indices
        owed = slices.values + tf.gather(lost, slices.indices)
        values = team.join(replica, owed, counts, name, wire=wire, seed=seed, feedback=True)
        rank = team.rank(replica)
        first = tf.reduce_sum(counts[:rank])
        sent = values[first : first + counts[rank]]
        _remember(lost, slices.indices, owed - sent, values)
        return values, indices

    def dense() -> tuple[tf.Tensor, tf.Tensor]:
        table = tf.convert_to_tensor(slices)
        every = tf.cast(tf.range(height), slices.indices.dtype)
        if lost is None:
            return team.sum(replica, table, name, wire, seed=seed), every
        total, rest = team.sum(replica, table, name, wire, lost.read_value(), seed)
        lost.assign(rest)
        return total, every

    joined_rows = team.size * tf.cast(tf.reduce_max(counts), tf.int64)
    values, indices = tf.cond(joined_rows <= _most_joined(slices, height), join, dense)
    return tf.IndexedSlices(tf.cast(values, dtype), indices, slices.dense_shape)


def sum_equal_rows(
    team: Team,
    replica: int,
    slices: tf.IndexedSlices,
    name: Name,
    wire: str = LOSSLESS,
    seed: Any = 0,
    lost: tf.Variable | None = None,
) -> tf.IndexedSlices:
    """Return the sum of rows that are the same rows on all replicas: see lookups.py."""
    if lost is None or team.size == 1:
        total = team.sum(replica, slices.values, name, wire, seed=seed)
        return tf.IndexedSlices(total, slices.indices, slices.dense_shape)
    dtype = slices.dtype
    slices = _to_remember(slices, lost)
    owed = tf.gather(lost, slices.indices)
    total, rest = team.sum(replica, slices.values, name, wire, owed, seed)
    _remember(lost, slices.indices, rest, total)
    return tf.IndexedSlices(tf.cast(total, dtype), slices.indices, slices.dense_shape)


def with_unique_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return unique rows in float32 or wider: rows that occur several times are added up."""
    indices, places = tf.unique(slices.indices)
    values = slices.values
    values = tf.cast(values, tf.float32) if values.dtype.size < 4 else values
    values = tf.math.unsorted_segment_sum(values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _to_remember(slices: tf.IndexedSlices, lost: tf.Variable) -> tf.IndexedSlices:
    """Return unique rows of the residual's type."""
    return with_numbers(with_unique_rows(slices), lambda x: tf.cast(x, lost.dtype))


def _most_joined(slices: tf.IndexedSlices, height: tf.Tensor) -> tf.Tensor:
    """Return the largest number of rows to join, for a table of this height."""
    width = slices.values.shape[1:].num_elements()
    always = JOIN_ALWAYS // (width * slices.dtype.size) if width else 0
    return tf.maximum(JOIN_UP_TO * 2 * height, always)


def _remember(table: tf.Variable, rows: tf.Tensor, lost: tf.Tensor, sums: tf.Tensor) -> None:
    """Store in the table what the rows have lost, unless a sum is not finite.

    In that case the table stays as it was, because the step may be undone.
    """
    finite = tf.reduce_all(tf.math.is_finite(sums))
    lost = tf.where(finite, lost, tf.gather(table, rows))
    table.scatter_update(tf.IndexedSlices(lost, rows))
