"""Part ``search`` of ``tfscale bench mach``: the ten best of very many classes."""

from __future__ import annotations

import dataclasses
import resource
import time

import numpy as np


@dataclasses.dataclass(frozen=True)
class Found:
    """Result with one number of candidates.

    Attributes:
        candidates: number of buckets of each repetition to look into first; 0 for all classes.
        per_second: queries per second.
        per_processor_second: queries per second of processor time.
        megabytes: how much the process has grown at its peak.
        right: share of samples whose true class is the first.
    """

    classes: int
    repetitions: int
    buckets: int
    candidates: int
    per_second: float
    per_processor_second: float
    megabytes: float
    right: float


def measure(classes: int, repetitions: int, buckets: int, samples: int = 128) -> list[Found]:
    """Return queries per second and the memory of a search for the ten best classes.

    A sample's true class has larger logits than others by a random amount in each repetition.
    """
    import tensorflow as tf

    from tfscale.training.extreme.hashing import buckets_of, keys_of
    from tfscale.training.extreme.search import Search

    rng, rows = np.random.default_rng(0), np.arange(samples)
    table = np.stack([buckets_of(keys_of(classes), buckets, 0, r) for r in range(repetitions)])
    logits = rng.standard_normal([repetitions, samples, buckets]).astype("float32")
    true = rng.integers(0, classes, samples)
    for r in range(repetitions):
        logits[r, rows, table[r, true]] += 16 * rng.random(samples)
    values = tf.nn.softmax(logits)
    search, found = Search(table, buckets, "mean"), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for candidates in (0, 4, 8):
        search.top(values, 10, candidates)
        begin, begin_processor = time.perf_counter(), time.process_time()
        _, labels = search.top(values, 10, candidates)
        seconds = time.perf_counter() - begin
        processor = time.process_time() - begin_processor
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
        right = float((labels[:, 0] == true).mean())
        rates = samples / seconds, samples / processor
        found.append(Found(classes, repetitions, buckets, candidates, *rates, more, right))
    return found


def in_words(found: Found) -> str:
    """Return the line that users see."""
    return (
        f"ten best of {found.classes:,} classes, R={found.repetitions}, B={found.buckets:,}, "
        f"candidates={found.candidates}: {found.per_second:,.0f} queries/s, "
        f"{found.per_processor_second:,.0f} in a second of processor time, "
        f"{found.megabytes:,.0f} MB more at the peak, true class first for {found.right:.0%}"
    )
