r"""Cross-entropies of logits that a team holds in slices: each replica has some of the classes.

Let :math:`x_v` be the logits of a row, :math:`y_v` its target, and :math:`m` the largest logit.
Keras's loss of the row is

.. math:: \log \sum_v e^{x_v - m} - \sum_v y_v (x_v - m).

The team finds :math:`m` by a gather of one number for each row, and both sums over :math:`v` by one
sum of two numbers for each row. So nobody needs the logits of all classes. This is the loss of
Megatron-LM (Shoeybi et al., 2019, section 3). As :math:`m` cancels, it has no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.losses import is_of_logits
from tfscale.bridge.objects import mask_of, with_mask
from tfscale.bridge.tensorflow import replica_id
from tfscale.exchange.team import Team
from tfscale.parallel.windows import slices
from tfscale.strategy.grid.collectives import gathered, summed
from tfscale.strategy.grid.halo import part_of
from tfscale.strategy.grid.spread import SpreadArrays

# Returns two sums over a replica's classes, for each row.
Sums = Callable[[tf.Tensor, tf.Tensor], Sequence[tf.Tensor]]

_OUTSIDE = "labels outside of the range of the classes, from 0 to less than:"


@contextlib.contextmanager
def taking_slices(arrays: SpreadArrays, team: Team) -> Iterator[None]:
    """Make Keras's cross-entropies compute with slices of logits within this context.

    Other losses get whole arrays, and so do these two for arrays that are cut along another axis.

    Args:
        arrays: arrays that the team holds in slices.
        team: the team.
    """

    def called(
        original: Callable[..., Any], loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> Any:
        spread = arrays.of(y_pred)
        kind = None if spread is None else _kind(loss, y_true, y_pred)
        if spread is None or kind is None or spread.axis != y_pred.shape.rank - 1:
            return original(loss, y_true, y_pred, sample_weight)
        own = slices(spread.size, team.size)[team.rank(replica_id())]

        def of_rows(_: Any, loss: Any, y_true: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
            return kind(_Logits(team, part, own, spread.size, loss.name), loss, y_true)

        part = with_mask(tf.identity(spread.part), mask_of(y_pred))
        with hooks.LOSSES_OF_ROWS.on(loss, of_rows, in_thread=True):
            return original(loss, y_true, part, sample_weight)

    with hooks.CALL_LOSS.on(keras.losses.Loss, called):
        yield


class _Logits:
    """Logits of which this replica has some classes.

    Args:
        team: team of the replicas that have all classes together.
        part: logits of this replica's classes, which lie along the last axis.
        own: this replica's classes.
        classes: number of all classes.
        name: name of the loss.
    """

    def __init__(self, team: Team, part: tf.Tensor, own: range, classes: int, name: str) -> None:
        self.part, self.own, self.classes = part, own, classes
        self._team, self._name = team, name

    def losses(self, sums: Sums) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the two terms of the loss of each row.

        Args:
            sums: returns this replica's parts of the sums of exponentials, and of the targets times
                the logits, for each row; gets logits, and the largest logits, which are subtracted.
        """
        largest = tf.stop_gradient(tf.reduce_max(self.part, -1))
        every = gathered(self._team, largest, f"largest logits of {self._name}")
        own = tf.stack(sums(self.part, tf.reduce_max(every, 0)))
        exponentials, products = tf.unstack(summed(self._team, own, f"sums of {self._name}"))
        return tf.math.log(exponentials), products


def _kind(loss: Any, y_true: Any, y_pred: tf.Tensor) -> Callable[..., tf.Tensor] | None:
    """Return what computes a loss from slices of logits; None if only Keras does."""
    shape, rank = getattr(y_true, "shape", None), y_pred.shape.rank
    if shape is None or not is_of_logits(loss, rank):
        return None
    if isinstance(loss, keras.losses.CategoricalCrossentropy):
        return _categorical if len(shape) == rank and shape[-1] == y_pred.shape[-1] else None
    is_column = len(shape) == rank and shape[-1] == 1
    return _sparse if is_column or len(shape) == rank - 1 else None


def _sparse(logits: _Logits, loss: Any, y_true: tf.Tensor) -> tf.Tensor:
    """Return the losses of rows whose targets are numbers of classes."""
    labels = tf.squeeze(y_true, -1) if y_true.shape.rank == logits.part.shape.rank else y_true
    valid = None
    if loss.ignore_class is not None:
        valid = tf.not_equal(labels, tf.cast(loss.ignore_class, labels.dtype))
        labels = tf.where(valid, labels, tf.zeros_like(labels))
        logits.part = tf.where(valid[..., tf.newaxis], logits.part, tf.zeros_like(logits.part))
    labels = inside(tf.cast(labels, tf.int64), logits.classes, _OUTSIDE)
    exponentials, of_label = logits.losses(_sums_for(labels - logits.own.start, len(logits.own)))
    losses = exponentials - of_label
    if valid is None:
        return losses
    return with_mask(tf.where(valid, losses, tf.zeros_like(losses)), valid)


def _sums_for(place: tf.Tensor, classes: int) -> Sums:
    """Return a function that sums exponentials of a replica's logits, and takes those of labels.

    The exponentials take the memory of the logits, and their gradient that of the exponentials. So
    a step holds one array of the size of the logits, and not four.

    Args:
        place: places of the labels among the classes of this replica; others hold those outside.
        classes: number of classes of this replica.
    """
    held = tf.logical_and(place >= 0, place < classes)
    place = tf.where(held, place, tf.zeros_like(place))

    def or_zero(x: tf.Tensor) -> tf.Tensor:
        return tf.where(held, x, tf.zeros_like(x))

    def sums(x: tf.Tensor, largest: tf.Tensor) -> Any:
        @tf.custom_gradient
        def forward(x: tf.Tensor) -> Any:
            of_label = or_zero(tf.gather(x, place, axis=-1, batch_dims=place.shape.rank) - largest)
            with tf.control_dependencies([of_label]):  # nothing else needs the logits any more
                powers = tf.exp(x - largest[..., tf.newaxis])

            def backward(of_powers: tf.Tensor, slope: tf.Tensor) -> tf.Tensor:
                found = tf.reshape(powers * of_powers[..., tf.newaxis], [-1, classes])
                flat = tf.reshape(place, [-1])
                at = tf.stack([tf.range(tf.size(flat, tf.int64)), flat], -1)
                found = tf.tensor_scatter_nd_add(found, at, tf.reshape(or_zero(slope), [-1]))
                return tf.reshape(found, tf.shape(x))

            return (tf.reduce_sum(powers, -1), of_label), backward

        return forward(x)

    return sums


def inside(numbers: tf.Tensor, count: int, refusal: str) -> tf.Tensor:
    """Return numbers from 0 to ``count`` - 1; a wrong one fails the step, as on one device.

    Args:
        numbers: labels or indices.
        count: number of classes or rows.
        refusal: what the error says before it names ``count`` and the numbers.
    """
    are_right = tf.reduce_all(tf.logical_and(numbers >= 0, numbers < count))
    words = [tf.constant(refusal), tf.constant(count), numbers]
    with tf.control_dependencies([tf.raw_ops.Assert(condition=are_right, data=words)]):
        return tf.identity(numbers)


def _categorical(logits: _Logits, loss: Any, y_true: tf.Tensor) -> tf.Tensor:
    """Return the losses of rows whose targets are probabilities of classes."""
    if loss.label_smoothing:
        y_true = y_true * (1 - loss.label_smoothing) + loss.label_smoothing / logits.classes
    own = part_of(y_true, y_true.shape.rank - 1, logits.own)

    def sums(x: tf.Tensor, largest: tf.Tensor) -> Any:
        x = x - largest[..., tf.newaxis]
        return tf.reduce_sum(tf.exp(x), -1), tf.reduce_sum(own * x, -1)

    exponentials, of_targets = logits.losses(sums)
    # TensorFlow's gradient takes it that targets sum to 1, even if they don't.
    more = tf.reduce_sum(y_true, -1) - 1
    return exponentials + more * tf.stop_gradient(exponentials) - of_targets
