"""Callbacks that grow the batch during training instead of lowering the learning rate."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.callbacks import progress
from tfscale.support import arguments

if TYPE_CHECKING:
    from tfscale.callbacks.curvature_growth import CurvatureGrowth


_SIZES = (
    "a mapping from the step at which a batch size begins to that size, from step 0 on, "
    "such as {0: 256, 5000: 1024}"
)

_PASSES = (
    "a mapping from the number of passes after which a batch size begins to that size, from 0 on, "
    "such as {0: 256, 30: 1024}"
)


def _step(value: int) -> int:
    return arguments.whole(value, "a key of sizes", 0, what="a number of steps")


def _batch(value: int) -> int:
    return arguments.whole(value, "a value of sizes", 1, what="a batch size")


class BatchGrowth(keras.callbacks.Callback):
    r"""A callback that grows the global batch, as an alternative to lowering the rate.

    The noise of SGD's steps is proportional to :math:`\eta N / B`, for learning rate :math:`\eta`,
    :math:`N` samples and batch :math:`B`. So doubling the batch reduces the noise as much as
    halving the rate, with fewer updates and fewer exchanges between replicas.

    ``batches`` makes the data for ``fit``. The optimizer's step number decides the batch size, so a
    resumed training continues with the right size.

    - **Epochs.** The data has no end, so ``fit`` needs ``steps_per_epoch``. All its epochs have the
      same number of steps, and later epochs have more samples. Papers count passes over the data:
      ``by_epochs`` and ``steps`` convert passes into steps.
    - **The learning rate** stays as it is. Scale it for the first batch size.
    - **Replicas** get equal parts: each size must be a multiple of their number.
    - **Batches** are always full: a batch that begins at the end of a pass continues in the next
      pass. A new size begins a new pass.

    Args:
        sizes: maps the step at which a global batch size begins to that size; contains step 0.

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
        found = arguments.mapping(sizes, "sizes", _SIZES)
        self.sizes = dict(sorted((_step(s), _batch(b)) for s, b in found.items()))
        if 0 not in self.sizes:
            raise arguments.wrong(sizes, "sizes", _SIZES)
        self._first = 0
        self._read = False

    @classmethod
    def by_epochs(cls, sizes: Mapping[float, int], samples: int) -> BatchGrowth:
        """Return a growth that is defined by passes over the data, as in papers.

        Args:
            sizes: maps the number of passes after which a batch size begins to that size; contains
                0.
            samples: number of samples of a pass.
        """
        passes = arguments.mapping(sizes, "sizes", _PASSES)
        samples = arguments.whole(samples, "samples", 1, what="a number of samples")
        for begin, size in passes.items():
            arguments.real(begin, "a key of sizes", 0, what="a number of passes")
            _batch(size)
        if 0 not in passes:
            raise arguments.wrong(sizes, "sizes", _PASSES)
        stages = sorted(passes.items())
        found, step = dict(stages[:1]), 0
        for (begin, size), (end, following) in itertools.pairwise(stages):
            step += round((end - begin) * samples / size)
            found[step] = following
        return cls({int(first): size for first, size in found.items()})

    @classmethod
    def by_curvature(
        cls,
        batch: int,
        largest: int,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        samples: int,
        batch_size: int | None = None,
        factor: int = 2,
        fall: float = 2.0,
        patience: int = 10,
        raise_rate: bool = True,
        file: str | Path | None = None,
    ) -> CurvatureGrowth:
        r"""Grow batch and rate as the loss becomes flatter: ABS; with adversarial samples ABSA [1].

        In a steep region, the noise of small batches helps to leave it; in a flat region, large
        batches suffice. So before each epoch except the first, the callback measures the largest
        eigenvalue :math:`\lambda` of the loss's Hessian. The batch is multiplied by ``factor``, up
        to ``largest``, when

        .. math:: \lambda \le \lambda_\text{ref} / \text{fall}

        or when the batch has not grown for ``patience`` epochs. :math:`\lambda_\text{ref}` is the
        first measured eigenvalue; after each such fall it is the eigenvalue of that fall. The
        learning rate is multiplied by the same factor as the batch.

        - **Epochs.** An epoch is a pass over the data, rounded up to whole batches: leave out
          ``steps_per_epoch``. As batches grow, an epoch has fewer steps. A new size begins a new
          pass.
        - **Resuming.** The callback writes its measurements and decisions to ``file``. A resumed
          training reads the decisions up to its step: size, rate, reference.
        - **The learning rate** may not be set by anything else; ``Warmup`` is refused. With
          ``raise_rate=False`` the callback leaves the rate alone, and anything may set it. Keras's
          SGD stores old rates in its momentum, so after growth it takes some steps to follow.
        - **Replicas** get equal parts: ``batch`` and ``largest`` must be multiples of their number.
          All must be in one process; several processes are refused.
        - **Adversarial samples**: ``Adversarial(attack, share=growth.share(0.2))`` divides their
          share by the growth of the batch, and stops them at the largest batch.

        Args:
            batch: the first global batch.
            largest: the largest global batch.
            x: data for the measurements: some hundreds of samples, the same each time; or a
                dataset.
            y: their targets.
            sample_weight: their weights.
            samples: number of samples of a pass.
            batch_size: rows of a batch in measurements, if ``x`` holds arrays.
            factor: factor of the batch and of the rate.
            fall: the batch grows when the eigenvalue has fallen by this factor.
            patience: the batch grows after this number of epochs in any case.
            raise_rate: whether the learning rate grows, too.
            file: the file of decisions; a training needs it to be resumable.

        Example:
            >>> import keras, numpy as np, tensorflow as tf, tfscale
            >>> x, y = np.eye(40, 2), np.ones([40, 1])
            >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
            >>> model.compile(keras.optimizers.SGD(0.01), "mse")
            >>> growth = tfscale.callbacks.BatchGrowth.by_curvature(
            ...     10, 40, x, y, samples=40, patience=2
            ... )
            >>> data = growth.batches(tf.data.Dataset.from_tensor_slices((x, y)))
            >>> history = model.fit(data, epochs=5, callbacks=[growth], verbose=0)
            >>> print(history.history["batch_size"], growth.sizes)
            [10, 10, 20, 20, 40] {0: 10, 8: 20, 12: 40}
            >>> print(f"{float(model.optimizer.learning_rate):.2f}")
            0.04

        Reference:
            [1] Yao, Gholami, Arfeen, Liaw, Gonzalez, Keutzer, Mahoney, Large batch size training of
            neural networks with adversarial training and second-order information,
            https://arxiv.org/abs/1810.01021. Its program measures after each epoch, on one batch.
        """
        from tfscale.callbacks.curvature_growth import (
            CurvatureGrowth,
        )  # the module imports this one

        return CurvatureGrowth(
            batch, largest, samples, (x, y, sample_weight), batch_size=batch_size, factor=factor,
            fall=fall, patience=patience, raise_rate=raise_rate, file=file,
        )  # fmt: skip

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
        expected = "a tf.data.Dataset of one pass, not in batches"
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
        if self.params["steps"] is None:
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
        return progress.steps(self.model.optimizer)


def _stage(
    samples: tf.data.Dataset, begin: Any, first: int, end: int | None, size: int
) -> tf.data.Dataset:
    """Return the remaining batches of one size, for a training that begins at a step."""
    batches = samples.repeat().batch(size, drop_remainder=True)
    if end is None:
        return batches
    return batches.take(tf.maximum(end - tf.maximum(begin, first), 0))
