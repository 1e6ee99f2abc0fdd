"""Part ``search`` of ``tfscale bench mach``: the ten best of very many classes."""

from __future__ import annotations

import dataclasses
import resource
import time
from typing import Any

import numpy as np

SEARCHES = {"C++": None, "all classes": 0, "4 best buckets first": 4}
_PEAKS = {"peaked": 16.0, "flat": 0.0}


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of one search with one kind of outputs.

    Attributes:
        search: "C++", or what TensorFlow's operations look into.
        outputs: "peaked", if a sample's true class has larger logits than others, or "flat".
        per_second: queries per second.
        per_processor_second: queries per second of processor time.
        megabytes: how much the process has grown at its peak since before the first search.
        right: share of samples whose true class is the first.
    """

    classes: int
    repetitions: int
    buckets: int
    search: str
    outputs: str
    per_second: float
    per_processor_second: float
    megabytes: float
    right: float


def measure(classes: int, repetitions: int, buckets: int, samples: int = 128) -> list[Found]:
    """Return queries per second and the memory of searches for the ten best classes.

    In peaked outputs a sample's true class has larger logits than others by a random amount in
    each repetition.
    """
    import tensorflow as tf

    from tfscale.native import library
    from tfscale.training.extreme.hashing import buckets_of, keys_of
    from tfscale.training.extreme.search import Search

    library.trouble()  # loads it, which is not part of a search
    rng, rows = np.random.default_rng(0), np.arange(samples)
    table = np.stack([buckets_of(keys_of(classes), buckets, 0, r) for r in range(repetitions)])
    logits = rng.standard_normal([repetitions, samples, buckets]).astype("float32")
    true = rng.integers(0, classes, samples)
    search, values = Search(table, buckets, "mean"), {}
    for name, peak in _PEAKS.items():
        for r in range(repetitions):
            logits[r, rows, table[r, true]] += peak * rng.random(samples)
        values[name] = tf.nn.softmax(logits)
        logits = rng.standard_normal(logits.shape).astype("float32")
    return _measured(search, values, true)


def _measured(search: Any, values: dict[str, Any], true: Any) -> list[Found]:
    shape, found = (search.classes, search.repetitions, search.buckets), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, candidates in SEARCHES.items():
        for outputs, given in values.items():
            search.top(given, 10, candidates)
            begin, begin_processor = time.perf_counter(), time.process_time()
            _, labels = search.top(given, 10, candidates)
            times = time.perf_counter() - begin, time.process_time() - begin_processor
            more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
            per_second, per_processor_second = (len(true) / each for each in times)
            right = float((labels[:, 0] == true).mean())
            found.append(
                Found(*shape, name, outputs, per_second, per_processor_second, more, right)
            )
    return found


def in_words(found: Found) -> str:
    """Return the line that users see."""
    return (
        f"ten best of {found.classes:,} classes, R={found.repetitions}, B={found.buckets:,}, "
        f"{found.search}, {found.outputs} outputs: {found.per_second:,.0f} queries/s, "
        f"{found.per_processor_second:,.0f} in a second of processor time, "
        f"{found.megabytes:,.0f} MB more at the peak, true class first for {found.right:.0%}"
    )
