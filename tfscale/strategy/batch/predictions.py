"""Predictions of all replicas, joined in the order of the rows that they were made from.

Keras joins what replicas predict. For several workers, Keras calls TensorFlow's ``gather``, which
accepts only dense numbers. Keras also cannot join sparse tensors of one worker's replicas. So the
strategy joins predictions itself, and gives Keras the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.tensorflow import DistributedValues, PerReplica
from tfscale.exchange.team import Team
from tfscale.strategy.batch.rows import joined_rows, number_of_rows, rows_between
from tfscale.strategy.batch.shares import in_order_of_outputs
from tfscale.strategy.extended import Extended

_NAME = "predictions"


def share_batches_out(strategy: tf.distribute.Strategy) -> None:
    """Give workers of one device each a part of ``predict_on_batch``, while a strategy lives.

    Keras distributes batches, but not this one. Within the step, a worker of one device cannot tell
    the batch of all workers from its own part. Does nothing with Keras 2, which distributes it.
    """
    if not KERAS_2:
        hooks.PREDICT_ON_BATCH.put(keras.Model, _predict_part, while_lives=strategy)


def _predict_part(predict: Callable[..., Any], model: Any, x: Any) -> Any:
    extended = model.distribute_strategy.extended
    if isinstance(extended, Extended) and len(extended.worker_devices) == 1:
        x = tf.nest.map_structure(lambda batch: _local_parts(extended, batch)[0], x)
    return predict(model, x)


def parts(extended: Extended, value: Any) -> Any:
    """Cut a batch that is not distributed yet into a part for each of several local replicas."""
    if isinstance(value, np.ndarray):  # an eager step, or ``predict_on_batch``
        value = tf.convert_to_tensor(value)
    is_one = len(extended.worker_devices) == 1
    if is_one or not tf.is_tensor(value) or isinstance(value, DistributedValues):
        return value
    return PerReplica(tuple(_local_parts(extended, value)))


def _local_parts(extended: Extended, batch: Any) -> list[Any]:
    """Return the rows of each local replica."""
    grid, local = extended.grid, len(extended.worker_devices)
    givers = in_order_of_outputs(
        filter(grid.gives_outputs, range(extended.number_of_replicas)), local
    )
    order = [grid.part_of_batch(rank) for rank in givers]
    mine = range(extended.first_rank, extended.first_rank + local)
    rows = number_of_rows(batch) if tf.is_tensor(batch) else len(batch)
    places, number = [order.index(grid.part_of_batch(rank)) for rank in mine], len(givers)
    return [rows_between(batch, rows * at // number, rows * (at + 1) // number) for at in places]


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
        return joined_rows(parts)

    return tf.nest.map_structure(whole, outputs)


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
