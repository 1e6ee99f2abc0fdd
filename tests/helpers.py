"""Helpers of the tests of ops, in one process and in many."""

from __future__ import annotations

import functools
import re
import time
from pathlib import Path

import numpy as np

from tfscale.collectives import ALGORITHMS
from tfscale.collectives.wires import FORMATS
from tfscale.ops import WIRES

LOSSY = tuple(wire for wire in WIRES if not FORMATS[wire].lossless)

# Seconds, longer than anything takes on the busiest machine: what comes sooner did not wait.
PATIENCE = 120

# The largest error of one rounding without error feedback, as a share of the block's largest
# number.
ERROR = {
    wire: 1 / min(known.unaided.of_number, known.unaided.of_block)
    for wire, known in FORMATS.items()
}


@functools.cache
def group(ranks: int):
    """Ranks on the first logical CPUs of this process; no test waits for their deadline."""
    from tfscale.ops import Group

    return Group.local([f"CPU:{i}" for i in range(ranks)], deadline=PATIENCE)


@functools.cache
def mirrored():
    """TensorFlow's strategy of two devices: one in a process, for a second of the same devices
    numbers its collectives as the first does, and when the two meet, all collectives end.
    """
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def numpy(structure):
    import tensorflow as tf

    return tf.nest.map_structure(lambda t: t.numpy(), structure)


def run(body, *values, ranks=None, times=1):
    """Return ``body`` of each rank as numpy arrays; each argument has one value per rank."""
    function = group(ranks or len(values[0])).function(body)
    for _ in range(times):
        results = function(*values)
    return numpy(results)


def slowly(x, seconds: float = 0.4):
    """Return the numbers after a delay."""
    import tensorflow as tf

    def wait(x):
        time.sleep(seconds)
        return x

    y = tf.py_function(wait, [x], x.dtype)
    y.set_shape(x.shape)
    return y


def normal(ranks: int, *shape: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32) for _ in range(ranks)]


def integers(ranks: int, *shape: int, dtype=np.float32, seed: int = 0) -> list[np.ndarray]:
    """Numbers whose sums are exact in every type."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-20, 21, shape).astype(dtype) for _ in range(ranks)]


def assert_same_bits(results) -> None:
    for rank, result in enumerate(results):
        same = np.asarray(result).tobytes() == np.asarray(results[0]).tobytes()
        assert same, f"rank {rank} has other bits than rank 0"


def assert_conserved(inputs, old, outputs, new, divisor: float = 1, case: object = "") -> None:
    """The rule of error feedback, added up in float64, rank by rank and number by number."""

    def total(tensors):
        return sum(np.asarray(t, np.float64) for t in tensors)

    before = total(inputs) + total(old)
    after = divisor * np.asarray(outputs[0], np.float64) + total(new)
    size = sum(np.abs(np.asarray(t, np.float64)) for t in [*inputs, *old, *new])
    wrong = np.abs(before - after)
    limit = 2e-6 * np.max(size, initial=0)
    assert np.all(wrong <= limit), f"{case}: {np.max(wrong)} went missing, {limit} may"


def halving_by_reduce_scatter(ranks: int):
    """The algorithms that give chunk r to rank r."""
    power_of_two = ranks & (ranks - 1) == 0
    return ["ring", "direct", *(["halving"] if power_of_two else [])]


def names(message: str) -> set[int]:
    """The ranks that an error names."""
    return {int(rank) for rank in re.findall(r"rank (\d+) \(", message)}


def assert_disagreement(message: str, odd: int) -> None:
    """A rank says that it and the odd one do not agree; an error may hold what several say."""
    causes = [line for line in message.splitlines() if "ranks do not agree" in line]
    assert causes, message
    for cause in causes:
        assert odd in names(cause) and len(names(cause)) == 2, message


ROOT = Path(__file__).parents[1]

__all__ = ["ALGORITHMS", "WIRES"]
