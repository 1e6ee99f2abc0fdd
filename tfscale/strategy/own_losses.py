r"""Losses that users compute themselves, so that nobody can see what they divide by.

Gradients are summed over replicas. So a replica's loss must be its part of the loss of the whole
batch. Keras's losses and a division by ``num_replicas_in_sync`` make it so, and share.py sees that:
such a loss is *scaled*. A loss that a ``train_step`` or ``compute_loss`` computes by itself, with
``tf.reduce_mean(...)`` for example, is not. ``ScaleStrategy(own_losses=...)`` says what it is:

- ``"mean"``: a mean over the replica's samples. It is weighted by the replica's share.
- ``"sum"``, ``"scaled"``: a sum over samples; or one that divides by the global batch already.
  Replicas' losses add up as they are.
- None: taken for a mean, and a warning says so.

To weight a gradient instead of its loss is too late where replicas sum within the forward pass,
as synchronized batch normalization does: there a replica's gradient holds parts of all replicas'
losses. ``summed_backwards`` weights those parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.bridge.protocols import Model
from tfscale.strategy.current import current
from tfscale.strategy.share import Share, are_scaled, is_scaled

CHOICES = ("mean", "sum", "scaled")

_told: set[str] = set()


def checked(choice: str | None) -> str | None:
    """The same, if it is one."""
    if choice not in (None, *CHOICES):
        raise ValueError(f'own_losses is "mean", "sum", "scaled" or None, got {choice!r}')
    return choice


def scaled_loss(loss: Any, since: int, sums: bool = False) -> Any:
    """A replica's loss as its part of the whole batch's.

    Args:
        loss: of this replica's samples.
        since: how often the step had read its share before the loss was made.
        sums: this one is known to be a sum.
    """
    if is_scaled(loss, since):
        return loss
    return loss * (_share().present(loss.dtype) if sums else _weight(loss.dtype))


def part_of_mean(compute: Callable[[], Any]) -> Any:
    """What a function gives, a mean over this replica's rows, as its part of the whole batch's."""
    since = current.reads
    loss = tf.convert_to_tensor(compute())
    return loss if is_scaled(loss, since) else loss * _share().part(loss.dtype)


def scaled_gradients(gradients: list[Any]) -> list[Any]:
    """The gradients of such losses; None stays None.

    A scaled loss may contain sums that are not scaled; a replica without rows adds 0 to them.
    """
    given = [g for g in gradients if g is not None]
    scaled = zip(given, are_scaled(given), strict=True)
    done = iter([current.rows.counted(g) if is_ else _weighted(g) for g, is_ in scaled])
    return [None if g is None else next(done) for g in gradients]


def logged(result: Any, of_metrics: set[int]) -> Any:
    """What a step returns, where its numbers are means over all samples of the batch.

    Args:
        result: of the step.
        of_metrics: ids of those in it that are results of metrics: these are no parts of a sum.
    """
    values = tf.nest.flatten(result)
    numbers = [i for i, value in enumerate(values) if _is_number(value)]
    if not numbers:
        return result
    parts = [
        values[i]
        if scaled and id(values[i]) not in of_metrics
        else values[i] * _share().weight(values[i].dtype)
        for i, scaled in zip(numbers, are_scaled([values[i] for i in numbers]), strict=True)
    ]
    for i, total in zip(numbers, _sum(parts), strict=True):
        values[i] = total
    return tf.nest.pack_sequence_as(result, values)


def summed_backwards(sums: Callable[[list[Any]], list[Any]], gradients: list[Any]) -> list[Any]:
    """Gradients that go back through a sum over replicas of their forward passes.

    Each replica multiplies what it sends by its weight, and divides the total by that weight:
    later the weight is applied to all of the replica's gradient. A replica without rows sends
    and gets zeros.
    """
    late = [current.own and not is_scaled(g) for g in gradients]
    given = [
        g * _unseen_weight(g.dtype) if is_late else current.rows.counted(g)
        for g, is_late in zip(gradients, late, strict=True)
    ]
    return [
        tf.math.divide_no_nan(g, _unseen_weight(g.dtype)) if is_late else current.rows.counted(g)
        for g, is_late in zip(sums(given), late, strict=True)
    ]


def _is_real(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def _is_number(value: Any) -> bool:
    return _is_real(value) and value.shape.rank == 0


def _sum(tensors: list[Any]) -> Any:
    return tf.distribute.get_replica_context().all_reduce("SUM", tensors)


def _share() -> Share:
    assert isinstance(current.count, Share)
    return current.count


def _are_means() -> bool:
    return tf.distribute.get_strategy().own_losses in (None, "mean")


def _weight(dtype: tf.DType) -> tf.Tensor:
    if tf.distribute.get_strategy().own_losses is None:
        _warn(current.model)
    return _share().part(dtype) if _are_means() else _share().present(dtype)


def _unseen_weight(dtype: tf.DType) -> tf.Tensor:
    """The same, which does not make a scaled one of a gradient."""
    return _share().weight(dtype) if _are_means() else tf.cast(current.rows.local > 0, dtype)


def _weighted(gradient: Any) -> Any:
    weight = _weight(gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * weight
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * weight


def _warn(model: Model) -> None:
    name = f"{model.name!r} ({type(model).__name__})"
    if name in _told:
        return
    _told.add(name)
    logging.getLogger("tfscale").warning(
        "%s computes a loss without Keras's loss objects, so tfscale cannot see what the loss "
        "divides by. tfscale takes it for a mean over the replica's samples, and weights it by "
        'their number. If that is right, ScaleStrategy(own_losses="mean") ends this warning. If '
        'the loss is a sum over samples, pass own_losses="sum"; if it is divided by the size of '
        'the global batch already, own_losses="scaled". See docs/strategy.md, "Losses of your '
        'own".',
        name,
    )
