"""Losses of Keras while they are called: what they are of each element, and what they divide by."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.objects import mask_of
from tfscale.bridge.shadow import shadowed

if not KERAS_2:
    from keras.src.trainers.compile_utils import CompileLoss


def as_compiled(loss: Any) -> Any:
    """What ``compile`` makes of a loss, or of its name."""
    return CompileLoss(keras.losses.get(loss))


def innermost_loss(loss: Any) -> Any:
    """The loss object that others have wrapped."""
    while hasattr(loss, "wrapped"):
        loss = loss.wrapped
    return loss


@contextlib.contextmanager
def watched(
    loss: Any, y_pred: Any, sample_weight: Any, tell: Callable[[Any, Any], None]
) -> Iterator[None]:
    """While it lasts, what calls a loss object also calls ``tell``, before it reduces losses.

    Args:
        loss: the object, perhaps within others.
        y_pred: what it will be called with.
        sample_weight: what it will be called with.
        tell: takes the loss of each element (None if that is not known), and what a mean divides
            by if that is not the number of elements: what a mask leaves, or a sum of weights.
    """
    loss, masks = innermost_loss(loss), [mask_of(y_pred)]
    if not hasattr(type(loss), "call"):
        tell(None, divisor(loss, masks, sample_weight))
        yield
        return

    def told(losses: Any) -> None:
        masks.append(mask_of(losses))  # a class to ignore gives one
        tell(losses, divisor(loss, masks, sample_weight))

    with _calls_of(loss) as calls:
        calls.mine.told.append(told)
        try:
            yield
        finally:
            calls.mine.told.pop()


class _Mine(threading.local):
    def __init__(self) -> None:
        self.told: list[Callable[[Any], None]] = []


class _Calls:
    """In place of a loss object's ``call``: tells the watchers of the thread that calls.

    Eagerly replicas, each in its thread, take turns in the middle of a call, and share the object.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.mine = _Mine()
        self.watched = contextlib.ExitStack()
        self.watchers = 0

    def __call__(self, *of_samples: Any) -> Any:
        losses = self.call(*of_samples)
        for told in self.mine.told:
            told(losses)
        return losses


_changing = threading.Lock()


@contextlib.contextmanager
def _calls_of(loss: Any) -> Iterator[_Calls]:
    """Those of this object, until the last thread that watches them has left."""
    with _changing:
        calls = vars(loss).get("call")
        if not isinstance(calls, _Calls):
            calls = _Calls(loss.call)
            calls.watched.enter_context(shadowed(loss, "call", calls))
        calls.watchers += 1
    try:
        yield calls
    finally:
        with _changing:
            calls.watchers -= 1
            if not calls.watchers:
                calls.watched.close()


def divisor(loss: Any, masks: list[Any], sample_weight: Any) -> Any:
    """What a mean of losses divides by, or None if that is the number of elements."""
    given = [tf.cast(mask, tf.bool) for mask in masks if mask is not None]
    mask = functools.reduce(tf.logical_and, given) if given else None
    weighted = getattr(loss, "reduction", None) == "mean_with_sample_weight"
    if not weighted or sample_weight is None:
        return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))
    weights = tf.convert_to_tensor(sample_weight)
    weights = weights if weights.dtype.is_floating else tf.cast(weights, tf.float32)
    if mask is not None:
        mask = tf.cast(mask, weights.dtype)
        if weights.shape.rank == mask.shape.rank + 1:
            weights = tf.squeeze(weights, -1)
        weights = weights * mask
    return tf.reduce_sum(weights)


def sums(loss: Any) -> bool:
    """Whether a loss is a sum over elements, not a mean."""
    return getattr(innermost_loss(loss), "reduction", None) in ("sum", "none", None)
