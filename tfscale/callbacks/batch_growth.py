"""Larger batches instead of lower learning rates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.callbacks import progress


class BatchGrowth(keras.callbacks.Callback):
    r"""Raises the global batch during the training, where others would lower the rate.

    The noise in SGD's steps is in proportion to :math:`\eta N / B`, for learning rate
    :math:`\eta`, :math:`N` samples and batch :math:`B`. So a batch twice as large reduces the
    noise as much as half the rate, with fewer updates, and fewer exchanges between replicas.

    ``batches`` makes the data for ``fit``. The number of the step, as the optimizer counts it,
    decides the batch size, so a training that is resumed goes on with the right one.

    - **Epochs.** The data has no end, so ``fit`` needs ``steps_per_epoch``. All its epochs have
      the same number of steps, and later epochs have more samples. Papers count passes over the
      data: ``by_epochs`` and ``steps`` convert these into steps.
    - **The learning rate** stays as it is. Scale it for the first batch size.
    - **Replicas** get equal parts: each size must be a multiple of their number.
    - Batches are always full: one that begins at the end of a pass goes on in the next pass. A
      new size begins a new pass.

    Args:
        sizes: from the step at which a global batch size begins, from 0, to that size.

    Example:
        >>> import keras, tensorflow as tf, tfscale
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> samples = tf.data.Dataset.from_tensor_slices((tf.zeros([40, 2]), tf.zeros([40, 1])))
        >>> growth = tfscale.callbacks.BatchGrowth.by_epochs({0: 10, 2: 20}, samples=40)
        >>> print(growth.sizes, growth.steps(4 * 40))
        {0: 10, 8: 20} 12
        >>> data = growth.batches(samples.shuffle(40))
        >>> history = model.fit(data, steps_per_epoch=4, epochs=3, callbacks=[growth], verbose=0)
        >>> print(history.history["batch_size"])
        [10, 10, 20]

    Reference: Smith, Kindermans, Ying, Le, Don't Decay the Learning Rate, Increase the Batch
    Size, https://arxiv.org/abs/1711.00489.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        super().__init__()
        self.sizes = dict(sorted(sizes.items()))
        if 0 not in self.sizes or min(self.sizes) < 0 or min(self.sizes.values()) < 1:
            raise ValueError(
                "sizes maps the step at which a batch size begins to that size, from step 0 on, "
                f"as in {{0: 256, 5000: 1024}}; got {dict(sizes)}"
            )
        self._first = 0
        self._read = False

    @classmethod
    def by_epochs(cls, sizes: Mapping[float, int], samples: int) -> BatchGrowth:
        """Growth by passes over the data, as in papers.

        Args:
            sizes: from the number of passes after which a batch size begins, from 0, to that size.
            samples: how many samples one pass has.
        """
        stages = sorted(sizes.items())
        found, step = dict(stages[:1]), 0
        for (begin, size), (end, following) in itertools.pairwise(stages):
            step += round((end - begin) * samples / size)
            found[step] = following
        return cls({int(first): size for first, size in found.items()})

    def size(self, step: int) -> int:
        """The global batch of a step."""
        return self.sizes[max(first for first in self.sizes if first <= step)]

    def steps(self, samples: int) -> int:
        """How many steps it takes to train on so many samples, added up over all passes."""
        done = 0
        for first, end, size in self._stages():
            needed = -(-samples // size)
            if end is None or needed <= end - first:
                return done + needed
            done, samples = end, samples - size * (end - first)
        raise AssertionError("the last stage has no end")

    def _stages(self) -> Iterator[tuple[int, int | None, int]]:
        """First step, the step after the last one, and size."""
        ends = [*list(self.sizes)[1:], None]
        for (first, size), end in zip(self.sizes.items(), ends, strict=True):
            yield first, end, size

    def batches(self, samples: tf.data.Dataset) -> tf.data.Dataset:
        """The data for ``fit``: the samples, pass after pass, in batches that grow.

        Args:
            samples: one pass, not in batches. A ``shuffle`` in it shuffles each pass anew.
        """

        def first_step() -> Any:
            self._read = True
            return np.int64(self._first)

        def from_first_step(_: Any) -> tf.data.Dataset:
            begin = tf.ensure_shape(tf.numpy_function(first_step, [], tf.int64), [])
            stages = [_stage(samples, begin, *stage) for stage in self._stages()]
            data = stages[0]
            for stage in stages[1:]:
                data = data.concatenate(stage)
            return data

        return tf.data.Dataset.range(1).flat_map(from_first_step).prefetch(tf.data.AUTOTUNE)

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        self._read = False
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        for size in self.sizes.values():
            if size % replicas:
                near = max(1, round(size / replicas)) * replicas
                raise ValueError(
                    f"a batch of {size} can't be shared equally by {replicas} replicas. "
                    f"Take a multiple of {replicas}, such as {near}"
                )
        if self.params["steps"] is None:
            raise ValueError(
                "the data of BatchGrowth has no end, so fit doesn't know where an epoch ends. "
                "Give fit steps_per_epoch=..."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras: after a checkpoint was restored, before the data is read."""
        self._first = self._steps_made()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if not self._read:
            raise RuntimeError(
                "fit has not read the data of this BatchGrowth, so batches did not grow. Give "
                "fit what growth.batches(samples) returns"
            )
        if logs is not None:
            logs["batch_size"] = self.size(max(0, self._steps_made() - 1))

    def _steps_made(self) -> int:
        return progress.steps(self.model.optimizer)


def _stage(
    samples: tf.data.Dataset, begin: Any, first: int, end: int | None, size: int
) -> tf.data.Dataset:
    """What is left, for a training that begins at a step, of the batches of one size."""
    batches = samples.repeat().batch(size, drop_remainder=True)
    if end is None:
        return batches
    return batches.take(tf.maximum(end - tf.maximum(begin, first), 0))
