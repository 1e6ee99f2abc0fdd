"""Predictions of all replicas, joined in the order of the rows that they were made from.

Keras joins what replicas predict. For several workers, Keras calls TensorFlow's ``gather``, which
accepts only dense numbers. Keras also cannot join sparse tensors of one worker's replicas. So the
strategy joins predictions itself, and gives Keras the result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.bridge.tensorflow import DistributedValues, PerReplica
from tfscale.exchange.team import Team

_NAME = "predictions"


def parts(strategy: tf.distribute.Strategy, value: Any) -> Any:
    """Cut a batch that is not distributed yet into a part for each local replica."""
    extended = strategy.extended
    local = len(extended.worker_devices)
    if isinstance(value, np.ndarray):  # an eager step, or ``predict_on_batch``
        value = tf.convert_to_tensor(value)
    if local == 1 or not tf.is_tensor(value) or isinstance(value, DistributedValues):
        return value
    rows, grid = tf.shape(value)[0], extended.grid
    # Keras joins what all first replicas predict, then all second ones, and so on.
    givers = sorted(
        filter(grid.gives_outputs, range(extended.number_of_replicas)),
        key=lambda rank: (rank % local, rank),
    )
    order = [grid.part_of_batch(rank) for rank in givers]
    mine = range(extended.first_rank, extended.first_rank + local)
    places, parts = [order.index(grid.part_of_batch(rank)) for rank in mine], len(givers)
    return PerReplica(tuple(value[rows * at // parts : rows * (at + 1) // parts] for at in places))


def joined(strategy: tf.distribute.Strategy, outputs: Any) -> Any:
    """Join what replicas have predicted for a batch.

    A batch is cut into as many parts as there are replicas, or teams of replicas that read the same
    rows. Workers get the parts in turn: first each worker gets a part for its first replica, then
    each gets a part for its second replica. Of a team, one replica gives the predictions:
    that of the last stage.

    Args:
        strategy: strategy whose replicas have made the predictions.
        outputs: result of the strategy's ``run``: a structure of dense, sparse or ragged tensors.
    """
    workers = strategy.extended.number_of_workers

    def whole(output: Any) -> Any:
        parts = strategy.experimental_local_results(output)
        if workers > 1:
            team = strategy.extended.host_team
            parts = [part for own in parts for part in _of_all_workers(team, own)]
        return _concatenated(parts)

    return tf.nest.map_structure(whole, outputs)


def _concatenated(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts), expand_nonconcat_dims=True)
    return tf.concat(list(parts), 0)


def _of_all_workers(team: Team, value: Any) -> list[Any]:
    """Gather ``value`` from all workers, which may have different numbers of rows."""
    every = functools.partial(_of_all_workers, team)
    if isinstance(value, tf.SparseTensor):
        sizes = tf.unstack(team.gather(0, value.dense_shape[tf.newaxis], _NAME))
        parts = zip(every(value.indices), every(value.values), sizes, strict=True)
        return [tf.SparseTensor(*part) for part in parts]
    if isinstance(value, tf.RaggedTensor):
        splits = zip(*map(every, value.nested_row_splits), strict=True)
        return [
            tf.RaggedTensor.from_nested_row_splits(flat, own, validate=False)
            for flat, own in zip(every(value.flat_values), splits, strict=True)
        ]
    if value.dtype == tf.string:
        sent = zip(every(_bytes_of(value)), every(tf.strings.length(value)), strict=True)
        return [_strings_of(*part) for part in sent]
    if value.dtype.is_complex:
        halves = zip(every(tf.math.real(value)), every(tf.math.imag(value)), strict=True)
        return [tf.complex(*part) for part in halves]
    counts = team.gather(0, tf.shape(value)[:1], _NAME)
    found: list[Any] = tf.split(team.concat(0, value, 0, _NAME), counts, num=team.size)
    return found


def _bytes_of(strings: tf.Tensor) -> tf.Tensor:
    """Return the bytes of all strings of a tensor, one string after another."""
    return tf.io.decode_raw(tf.strings.reduce_join(strings), tf.uint8)


def _strings_of(data: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """Return the strings of these lengths from the bytes that ``_bytes_of`` has joined."""
    letters = tf.gather(tf.constant([bytes([i]) for i in range(256)]), tf.cast(data, tf.int32))
    count = tf.size(lengths)
    owners = tf.repeat(tf.range(count), tf.reshape(lengths, [-1]))
    return tf.reshape(tf.strings.unsorted_segment_join(letters, owners, count), tf.shape(lengths))
