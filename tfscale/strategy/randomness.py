"""Random numbers that a step draws by ``tf.random``, whose seeds are equal in all processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_FOLD = 0x9E3779B1  # apart from seeds that people choose
_SEEDS = 1 << 31


@contextlib.contextmanager
def drawn_by_worker(extended: Any) -> Iterator[None]:
    """Let workers that read different rows draw different numbers in a step that is traced here.

    TensorFlow's seed of an operation depends on the global seed and on how many operations the
    graph has drawn by, which are the same for all workers. Within a process, replicas trace one
    graph, so that their seeds differ. The first worker draws what one process would draw.
    """
    place = extended.grid.part_of_batch(extended.first_rank)
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if place == 0 or graph is None or graph.seed is None:
        yield
        return
    seed = graph.seed
    graph.seed = (seed + place * _FOLD) % _SEEDS
    try:
        yield
    finally:
        graph.seed = seed
