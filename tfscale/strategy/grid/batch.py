"""Rows of a batch that the replicas of a model team read, if the team has several workers.

Each worker reads its own dataset. Workers that are to read the same rows may shuffle them
differently: Keras shuffles by default, and draws another order in each process. So the first
replica of a team sends its rows to the others.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfscale.exchange.team import Team, can_exchange

_NAME = "rows of the batch"


def of_first_replica(team: Team, data: Any) -> Any:
    """Return the first replica's data, on each replica of a team.

    Args:
        team: model team.
        data: structure of tensors; a replica calls this.

    Raises:
        TypeError: the data holds something else than numbers.
    """
    tensors = tf.nest.flatten(data, expand_composites=True)
    places = [i for i, x in enumerate(tensors) if tf.is_tensor(x)]
    _refuse([tensors[i] for i in places])
    found = team.together(
        lambda replica, own: [_sent(team, replica, x) for x in own], [tensors[i] for i in places]
    )
    for i, x in zip(places, found, strict=True):
        if not tf.executing_eagerly():
            x.set_shape(tensors[i].shape)
        tensors[i] = x
    return tf.nest.pack_sequence_as(data, tensors, expand_composites=True)


def _sent(team: Team, replica: int, x: tf.Tensor) -> tf.Tensor:
    shape = team.broadcast(replica, tf.shape(x), f"shape of {_NAME}")
    if team.rank(replica) > 0:
        x = tf.zeros(shape, x.dtype)
    return team.broadcast(replica, x, _NAME)


def _refuse(tensors: list[tf.Tensor]) -> None:
    for x in tensors:
        if not can_exchange(x.dtype):
            raise TypeError(
                f"the workers of a model team read the same rows, and the first one sends them to "
                f"the others, but tensors of type {x.dtype.name} cannot be sent. Convert them to "
                "numbers in the dataset (a StringLookup or TextVectorization in dataset.map), or "
                "let each worker have a whole model team"
            )
