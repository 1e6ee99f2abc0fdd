"""What a communicator ran, read back into Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfscale.ops import library
from tfscale.ops.bucket import BucketId


@dataclass(frozen=True)
class Execution:
    """One collective on one rank, whether it worked or not.

    Attributes:
        bucket: what was sent.
        start: when, in seconds of ``time.time()``, which TensorFlow's profiler uses too.
        end: when it had its result, and the other ranks all that it sent.
        sent: how many bytes the other ranks took from it.
    """

    bucket: BucketId
    start: float
    end: float
    sent: int


@dataclass(frozen=True)
class Total:
    """All collectives of one bucket on one rank; ``seconds`` from start to end, added up."""

    calls: int
    sent: int
    seconds: float


def executions(handle: Any, last: int | None = None) -> list[Execution]:
    """The last collectives that a communicator's log holds."""
    most = tf.int64.max if last is None else last
    return [
        Execution(bucket, start / 1e6, end / 1e6, sent)
        for bucket, start, end, sent in _rows(library.load().tfscale_executions(handle, most))
    ]


def totals(handle: Any) -> dict[BucketId, Total]:
    """All collectives of a communicator, added up for each bucket."""
    return {
        bucket: Total(calls, sent, microseconds / 1e6)
        for bucket, calls, sent, microseconds in _rows(library.load().tfscale_totals(handle))
    }


def _rows(columns: Any) -> Iterator[tuple[BucketId, int, int, int]]:
    """The first four columns are the bucket's."""
    lists = [column.numpy().tolist() for column in tf.nest.flatten(columns)]
    for label, owner, graph, number, *others in zip(*lists, strict=True):
        yield BucketId(label.decode(), owner.decode(), graph.decode(), number), *others
