"""Memory that a training takes on each replica, planned before it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfscale.compression.policy import policy_of
from tfscale.parallel.needs import needs_of
from tfscale.parallel.planned import Memory, planned
from tfscale.support import arguments


def of_training(
    model: keras.Model,
    batch: int,
    replicas: int = 1,
    shard: str | None = None,
    *,
    wire: Any = None,
    method: Any = None,
    optimizer: Any = "adam",
    input_shape: Sequence[int] | None = None,
    example: Any = None,
) -> Memory:
    """Return the memory that each replica of a training is planned to take. Nothing trains.

    Args:
        model: a Keras model, compiled or not.
        batch: number of samples of the global batch.
        replicas: number of replicas.
        shard: None, ``"optimizer"`` or ``"all"``, as for ``ScaleStrategy``.
        wire: wire of gradients, as for ``ScaleStrategy``.
        method: method of gradients, as for ``ScaleStrategy``.
        optimizer: optimizer of a model that is not compiled.
        input_shape: shape of one sample, if the model does not know it.
        example: a batch ``(x, y)`` of any size, if shapes cannot be told otherwise.

    Example:
        >>> model = keras.Sequential([keras.Input([512]), keras.layers.Dense(512)])
        >>> model.compile("adam", "mse")
        >>> memory = of_training(model, batch=64, replicas=4, shard="optimizer")
        >>> memory.most.weights, memory.most.slots
        (1050624, 525312)
    """
    arguments.whole(batch, "batch", 1, what="a number of samples")
    arguments.whole(replicas, "replicas", 1, what="a number of replicas")
    policy = policy_of(wire, method, None)
    of_each = -(-batch // replicas)
    needs = needs_of(model, of_each, optimizer, input_shape, example)
    return planned(needs, replicas, shard, policy)
