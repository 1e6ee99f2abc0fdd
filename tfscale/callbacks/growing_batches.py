"""Batches whose size depends on the step, and checks that ``fit`` reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.bridge.callbacks import steps_of_epoch
from tfscale.callbacks import progress
from tfscale.support import arguments

_SIZES = (
    "a mapping from the step at which a batch size begins to that size, from step 0 on, "
    "such as {0: 256, 5000: 1024}"
)


def _step(value: int) -> int:
    return arguments.whole(value, "a key of sizes", 0, what="a number of steps")


def checked_batch(value: int) -> int:
    """Return a batch size, or raise."""
    return arguments.whole(value, "a value of sizes", 1, what="a batch size")


class GrowingBatches(keras.callbacks.Callback):
    """Base of the callbacks that grow the global batch.

    Args:
        sizes: maps the step at which a global batch size begins to that size; contains step 0.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        super().__init__()
        found = arguments.mapping(sizes, "sizes", _SIZES)
        self.sizes = dict(sorted((_step(s), checked_batch(b)) for s, b in found.items()))
        if 0 not in self.sizes:
            raise arguments.wrong(sizes, "sizes", _SIZES)
        self._first = 0
        self._read = False

    def size(self, step: int) -> int:
        """Return the global batch of a step."""
        step = arguments.whole(step, "step", 0)
        return self.sizes[max(first for first in self.sizes if first <= step)]

    def steps(self, samples: int) -> int:
        """Return the number of steps that train on so many samples, summed over passes."""
        samples = arguments.whole(samples, "samples", 0, what="a number of samples")
        done = 0
        for first, end, size in self._stages():
            needed = -(-samples // size)
            if end is None or needed <= end - first:
                return done + needed
            done, samples = end, samples - size * (end - first)
        raise AssertionError("the last stage has no end")

    def _stages(self) -> Iterator[tuple[int, int | None, int]]:
        """Yield the first step, the step after the last one, and the size of each stage."""
        ends = [*list(self.sizes)[1:], None]
        for (first, size), end in zip(self.sizes.items(), ends, strict=True):
            yield first, end, size

    def batches(self, samples: tf.data.Dataset) -> tf.data.Dataset:
        """Return the data for ``fit``: the samples, pass after pass, in batches that grow.

        Args:
            samples: one pass, not in batches. A ``shuffle`` in it shuffles each pass anew.
        """
        expected = "a finite tf.data.Dataset of single samples, not of batches"
        arguments.instance(samples, "samples", tf.data.Dataset, expected)

        def first_step() -> Any:
            self._read = True
            return np.int64(self._first)

        def from_first_step(_: Any) -> tf.data.Dataset:
            begin = tf.ensure_shape(tf.numpy_function(first_step, [], tf.int64), [])
            return self._from(samples, begin)

        return tf.data.Dataset.range(1).flat_map(from_first_step).prefetch(tf.data.AUTOTUNE)

    def _from(self, samples: tf.data.Dataset, begin: Any) -> tf.data.Dataset:
        """Return all batches from a step on."""
        stages = [_stage(samples, begin, *stage) for stage in self._stages()]
        data = stages[0]
        for stage in stages[1:]:
            data = data.concatenate(stage)
        return data

    def on_train_begin(self, logs: Any = None) -> None:
        """Check the sizes and the number of steps of an epoch."""
        self._read = False
        self._check_sizes(self.sizes.values())
        if steps_of_epoch(self) is None:
            raise ValueError(
                "the data of BatchGrowth has no end, so fit doesn't know where an epoch ends. "
                "Give fit steps_per_epoch=..."
            )

    def _check_sizes(self, sizes: Iterable[int]) -> None:
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        for size in sizes:
            if size % replicas:
                near = max(1, round(size / replicas)) * replicas
                raise ValueError(
                    f"a batch of {size} can't be shared equally by {replicas} replicas. "
                    f"Take a multiple of {replicas}, such as {near}"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the step of the next batch, after a restore and before the data is read."""
        self._first = self._steps_made()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Check that ``fit`` reads this callback's data, and log the batch size."""
        if not self._read:
            raise RuntimeError(
                "fit has not read the data of this BatchGrowth, so batches did not grow. Give "
                "fit what growth.batches(samples) returns"
            )
        if logs is not None:
            logs["batch_size"] = self.size(max(0, self._steps_made() - 1))

    def _steps_made(self) -> int:
        return progress.steps(self.model)


def _stage(
    samples: tf.data.Dataset, begin: Any, first: int, end: int | None, size: int
) -> tf.data.Dataset:
    """Return the remaining batches of one size, for a training that begins at a step."""
    batches = samples.repeat().batch(size, drop_remainder=True)
    if end is None:
        return batches
    return batches.take(tf.maximum(end - tf.maximum(begin, first), 0))
