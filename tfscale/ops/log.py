"""What a communicator ran, read back into Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfscale.ops import library


@dataclass(frozen=True)
class Execution:
    """One collective on one rank, whether it worked or not.

    Attributes:
        bucket: its name.
        start: when, in seconds of ``time.time()``, which TensorFlow's profiler uses too.
        end: when it had its result, and the other ranks all that it sent.
        sent: how many bytes the other ranks took from it.
    """

    bucket: str
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
    most = tf.int64.max if last is None else last
    return [
        Execution(bucket.decode(), start / 1e6, end / 1e6, sent)
        for bucket, start, end, sent in _rows(library.load().tfscale_executions(handle, most))
    ]


def totals(handle: Any) -> dict[str, Total]:
    return {
        bucket.decode(): Total(calls, sent, microseconds / 1e6)
        for bucket, calls, sent, microseconds in _rows(library.load().tfscale_totals(handle))
    }


def _rows(columns: Any) -> Any:
    arrays = [column.numpy() for column in tf.nest.flatten(columns)]
    return zip(*[array.tolist() for array in arrays], strict=True)
