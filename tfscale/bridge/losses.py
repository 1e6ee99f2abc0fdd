"""Losses of Keras while they are called: the losses of elements, and what a mean divides by."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.hooks import REDUCE_LOSSES, is_assigned
from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.objects import Trainer

if not KERAS_2:
    from keras.src.backend.common.name_scope import current_path
    from keras.src.losses import loss as loss_module
    from keras.src.trainers.compile_utils import CompileLoss

# Computes a loss from what would have been called, losses of elements and a ``Reduction``.
Reduce = Callable[[Any, Any, "Reduction"], Any]


def as_compiled(loss: Any) -> Any:
    """Return the compiled loss that ``compile`` makes of a loss or of its name."""
    return CompileLoss(keras.losses.get(loss))


def sum_of_losses(model: Any, loss: Any) -> Any:
    """Return the sum of what layers have added to a loss, as Keras computes it on one device."""
    return Trainer._aggregate_additional_loss(model, loss)


def compiled_loss(model: Any) -> Any:
    """Return the losses that a model was compiled with; None if it has none."""
    return model._compile_loss


def loss_of_batch(model: Any, **batch: Any) -> Any:
    """Return a model's loss of a batch, added losses included."""
    return model._compute_loss(**batch)


def losses_of_outputs(compiled: Any) -> list[Any]:
    """Return the records of a compiled loss, one for each output, with its weight."""
    return list(compiled._flat_losses)


def is_of_logits(loss: Any, rank: int) -> bool:
    """Return whether a loss is a cross-entropy of Keras that takes logits, with classes last.

    Args:
        loss: the loss.
        rank: rank of the logits.
    """
    kinds = (keras.losses.SparseCategoricalCrossentropy, keras.losses.CategoricalCrossentropy)
    if type(loss) not in kinds or is_assigned(loss, "call"):
        return False
    options = loss._fn_kwargs
    return bool(options["from_logits"]) and options.get("axis", -1) in (-1, rank - 1)


def innermost_loss(loss: Any) -> Any:
    """Return the loss object that others have wrapped."""
    while hasattr(loss, "wrapped"):
        loss = loss.wrapped
    return loss


def name_of_called() -> str:
    """Return the name of the loss object that this thread is calling."""
    return str(current_path()).rpartition("/")[2]


def reducing(reduce: Reduce) -> contextlib.AbstractContextManager[None]:
    """Let loss objects that this thread calls reduce their losses by ``reduce`` in a block.

    However a program reaches a loss object, it ends in one function of Keras, which alone knows
    what the loss divides by.

    Args:
        reduce: gets the replaced function, the losses before they are reduced, and a ``Reduction``.
    """

    def replacement(
        original: Callable[..., Any],
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        def call(values: Any, how: Reduction) -> Any:
            return original(values, how.sample_weight, how.mask, how.reduction, how.dtype)

        return reduce(call, values, Reduction(sample_weight, mask, reduction, dtype))

    return REDUCE_LOSSES.on(loss_module, replacement, in_thread=True)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduction of the losses of elements to one number, with Keras's arguments."""

    sample_weight: Any
    mask: Any
    reduction: str | None
    dtype: Any

    @property
    def is_mean(self) -> bool:
        """Whether it divides by something."""
        return self.reduction not in ("sum", "none", None)

    def divisor(self) -> tf.Tensor | None:
        """Return the divisor of a mean, or None if it is the number of elements."""
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
