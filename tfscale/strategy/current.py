"""State of the replica that runs on this thread."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf


class _Current(threading.local):
    # The model whose step runs; None in a custom training loop.
    model: Any = None
    # Whether the model's class has a step or a loss of its own, so that losses may be of any kind.
    own = False
    # Numbers of rows that this replica holds of the global batch: see rows.py.
    rows: Any = None
    # ``batch`` is this replica's part of the batch. ``batch_ops`` maps the operations that give
    # the tensors of the batch to the positions of these tensors. ``origins`` is a cache: whether
    # an operation depends on data or random numbers of one replica only.
    batch: Any = ()
    batch_ops: Mapping[Any, int] = types.MappingProxyType({})
    origins: dict[Any, int] | None = None
    # The value of ``num_replicas_in_sync``, if it is a ``Share`` and not an int: see share.py.
    count: Any = None
    # ``reads`` counts how often a value has been scaled by ``count``. ``seen`` caches the bits of
    # operations in a graph, which say what the operations depend on: see share.py.
    reads = 0
    seen: dict[Any, int] | None = None
    # Whether the step has read the terms of a loss whose gradients a tape computes.
    looked = False
    # In an eager step: the value of ``reads`` when a layer last added a loss, and the ids of added
    # losses that have been scaled.
    noted = 0
    scaled: Any = ()
    # In a step whose logs the user makes: the results of metrics, by their ids.
    results: dict[int, Any] | None = None
    # Whether each replica makes this step alone, so that nothing is summed over replicas: True,
    # False, or a boolean tensor. See model_rounds.py.
    alone: Any = False
    # The exchange of the group whose replicas make such a step together: see teams.py.
    group: Any = None
    # Whether gradients have been reduced. All later values are the same on all replicas: nothing
    # is reduced again, and each replica assigns its own copy of a variable.
    reduced = False
    # A function that sums the gradients of a window, if gradients are accumulated.
    window: Any = None
    # ``statistics`` lists variables that this replica has assigned and that must be averaged: see
    # variables.py. ``agreed`` holds tensors that are the same on all replicas: a statistic that is
    # computed from these only need not be averaged.
    statistics: list[Any] | None = None
    agreed: Any = ()


current = _Current()


@contextlib.contextmanager
def during(**values: Any) -> Iterator[None]:
    """Set attributes of ``current`` within this context."""
    before = {name: getattr(current, name) for name in values}
    try:
        for name, value in values.items():
            setattr(current, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(current, name, value)


def on_a_replica() -> bool:
    """Return whether a replica calls this, in a step of a strategy."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
