"""Log of the collectives that a communicator has run, read from C++."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfscale.native import library
from tfscale.native.bucket import BucketId


@dataclass(frozen=True)
class Execution:
    """Collective on one rank, whether it succeeded or failed.

    Attributes:
        bucket: identity of the summed numbers.
        start: start time in seconds of ``time.time()``, which TensorFlow's profiler also uses.
        end: time at which this rank had its result, and the other ranks had all that it sent.
        sent: bytes that the other ranks received from this rank.
    """

    bucket: BucketId
    start: float
    end: float
    sent: int


@dataclass(frozen=True)
class Total:
    """Sums over all collectives of one bucket on one rank; ``seconds`` adds up end - start."""

    calls: int
    sent: int
    seconds: float


def executions(handle: Any, last: int | None = None) -> list[Execution]:
    """Return the last collectives in a communicator's log."""
    most = tf.int64.max if last is None else last
    return [
        Execution(bucket, start / 1e6, end / 1e6, sent)
        for bucket, start, end, sent in _rows(library.load().tfscale_executions(handle, most))
    ]


def totals(handle: Any) -> dict[BucketId, Total]:
    """Return the sums over all collectives of a communicator, for each bucket."""
    return {
        bucket: Total(calls, sent, microseconds / 1e6)
        for bucket, calls, sent, microseconds in _rows(library.load().tfscale_totals(handle))
    }


def _rows(columns: Any) -> Iterator[tuple[BucketId, int, int, int]]:
    """Yield a bucket and three numbers for each row; a bucket takes four columns."""
    lists = [column.numpy().tolist() for column in tf.nest.flatten(columns)]
    for label, owner, graph, number, *others in zip(*lists, strict=True):
        yield BucketId(label.decode(), owner.decode(), graph.decode(), number), *others
