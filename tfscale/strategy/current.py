"""What the replica that runs on this thread is doing."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf


class _Current(threading.local):
    # The model whose step this is, None in a loop of the user's own.
    model: Any = None
    # Whether its class has a step or a loss of its own, so that losses may be of any kind.
    own = False
    # What this replica holds of the global batch: see rows.py.
    rows: Any = None
    # Its part of that batch, and the operations that give its tensors, with the places of these;
    # of which operations it is known whether one replica alone made them.
    batch: Any = ()
    batch_ops: Mapping[Any, int] = types.MappingProxyType({})
    origins: dict[Any, int] | None = None
    # What ``num_replicas_in_sync`` answers, if not the plain number: see share.py.
    count: Any = None
    # How often something has been scaled by it; in a graph, what is known of which operations
    # depend on that.
    reads = 0
    seen: dict[Any, int] | None = None
    # Whether the terms of a loss whose gradients a tape computes have been looked at.
    looked = False
    # In an eager step: ``reads`` at the last loss that a layer added, and the ids of such losses
    # that have been scaled.
    noted = 0
    scaled: Any = ()
    # In a step whose logs the user makes: the results of metrics, by the ids of these.
    results: dict[int, Any] | None = None
    # Whether replicas make this step each for itself, so that nothing is summed over them: True,
    # False, or a tensor that says so. See course.py.
    alone: Any = False
    # What a group of replicas sums by that make such a step together: see groups.py.
    group: Any = None
    # Gradients have been reduced: what follows is the same on all replicas, so
    # nothing is reduced again and variables are assigned where they are.
    reduced = False
    # Sums a window's gradients, where they are accumulated.
    window: Any = None
    # Statistics that this replica has assigned, to be averaged: see variables.py. Tensors that are
    # the same on all replicas, of which statistics may be made that need not be.
    statistics: list[Any] | None = None
    agreed: Any = ()


current = _Current()


@contextlib.contextmanager
def during(**values: Any) -> Iterator[None]:
    """Set attributes of ``current`` for a while."""
    before = {name: getattr(current, name) for name in values}
    try:
        for name, value in values.items():
            setattr(current, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(current, name, value)


def on_a_replica() -> bool:
    """Whether a replica calls this, in a step of a strategy."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
