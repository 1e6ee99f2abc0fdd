"""Callbacks that grow the batch during training instead of lowering the learning rate."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfscale.callbacks.curvature_growth import CurvatureGrowth
from tfscale.callbacks.growing_batches import GrowingBatches, checked_batch
from tfscale.support import arguments

_PASSES = (
    "a mapping from the number of passes after which a batch size begins to that size, from 0 on, "
    "such as {0: 256, 30: 1024}"
)


class BatchGrowth(GrowingBatches):
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
            checked_batch(size)
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
        return CurvatureGrowth(
            batch, largest, samples, (x, y, sample_weight), batch_size=batch_size, factor=factor,
            fall=fall, patience=patience, raise_rate=raise_rate, file=file,
        )  # fmt: skip
