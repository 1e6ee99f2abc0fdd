"""Losses of Keras while they are called: what they are of each element, and what they divide by."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.hooks import replaced
from tfscale.bridge.installed import KERAS_2

if not KERAS_2:
    from keras.src.backend.common.name_scope import current_path
    from keras.src.losses import loss as loss_module
    from keras.src.trainers.compile_utils import CompileLoss

# Computes a loss from what would have been called, losses of elements and a ``Reduction``.
Reduce = Callable[[Any, Any, "Reduction"], Any]


def as_compiled(loss: Any) -> Any:
    """What ``compile`` makes of a loss, or of its name."""
    return CompileLoss(keras.losses.get(loss))


def innermost_loss(loss: Any) -> Any:
    """The loss object that others have wrapped."""
    while hasattr(loss, "wrapped"):
        loss = loss.wrapped
    return loss


class _Mine(threading.local):
    reduce: Reduce | None = None


_mine = _Mine()


def name_of_called() -> str:
    """The name of the loss object that this thread is calling."""
    return str(current_path()).rpartition("/")[2]


@contextlib.contextmanager
def reducing(reduce: Reduce) -> Iterator[None]:
    """While it lasts, loss objects that this thread calls reduce their losses by ``reduce``.

    However a program reaches a loss object, it ends in one function of Keras, which alone knows
    what the loss divides by.

    Args:
        reduce: gets what would have been called, the losses before they are reduced, and a
            ``Reduction``.
    """
    before = _mine.reduce

    def within(call: Any, values: Any, how: Reduction) -> Any:
        return reduce(call if before is None else functools.partial(before, call), values, how)

    _mine.reduce = within
    try:
        with replaced(loss_module, "reduce_weighted_values", _reduce):
            yield
    finally:
        _mine.reduce = before


def _reduce(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: Any = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    def call(values: Any, how: Reduction) -> Any:
        return original(values, how.sample_weight, how.mask, how.reduction, how.dtype)

    how = Reduction(sample_weight, mask, reduction, dtype)
    return call(values, how) if _mine.reduce is None else _mine.reduce(call, values, how)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How a loss object reduces the losses of elements to one number; arguments as of Keras."""

    sample_weight: Any
    mask: Any
    reduction: str | None
    dtype: Any

    @property
    def is_mean(self) -> bool:
        """Whether it divides by something."""
        return self.reduction not in ("sum", "none", None)

    def divisor(self) -> tf.Tensor | None:
        """What a mean divides by, or None if that is the number of elements."""
        mask = None if self.mask is None else tf.cast(self.mask, tf.bool)
        if self.reduction != "mean_with_sample_weight" or self.sample_weight is None:
            return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))
        weights = tf.convert_to_tensor(self.sample_weight)
        weights = weights if weights.dtype.is_floating else tf.cast(weights, tf.float32)
        if mask is not None:
            mask = tf.cast(mask, weights.dtype)
            if weights.shape.rank == mask.shape.rank + 1:
                weights = tf.squeeze(weights, -1)
            weights = weights * mask
        return tf.reduce_sum(weights)
