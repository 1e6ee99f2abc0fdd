r"""The loss of a model on a batch, as a function of some of its variables.

A mean over all data is a weighted sum over batches: :math:`L = \sum_b \frac{d_b}{\sum_c d_c} L_b`,
where :math:`L_b` is the loss of a batch and :math:`d_b` its divisor: the number of rows, the number
of elements that a mask leaves, or the sum of weights, as in Keras. Each compiled loss has its own
:math:`d_b`. Losses that layers and regularizers add are weighted by rows. So each part of a batch's
loss is weighted separately.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.losses import (
    Reduction,
    compiled_loss,
    innermost_loss,
    loss_of_batch,
    losses_of_outputs,
    reducing,
)
from tfscale.bridge.models import overrides
from tfscale.bridge.objects import (
    LAYER_SEED,
    copy_of,
    layers_of,
    native,
    path_of,
    takes_training,
)
from tfscale.bridge.stateless import regularized
from tfscale.exchange.scaling import scaling

# A function of a model and a batch, as ``fit`` gives it to a step: the losses of its rows, or their
# mean.
OwnLoss = Callable[[Any, Any], Any]
# A function of a loss object, predictions, and the index of this loss: other targets.
Draw = Callable[[Any, tf.Tensor, int], tf.Tensor]

_STRIDE = 7919  # distance between the random states of consecutive batches


class Parts:
    """The contribution of this replica's part of a batch to the loss, part by part.

    Attributes:
        loss: the whole contribution.
        divisors: divisor of each part for this replica's rows; the last one is the number of rows.
        terms: contribution of each part.
        elements: for each loss, what it reduces: the losses of all elements, or one number if the
            loss has reduced them already; None if the loss shows nothing.
        outputs: the outputs of the model.
    """

    def __init__(self, batch: Any, scales: Any, losses: int) -> None:
        rows = tf.cast(tf.shape(tf.nest.flatten(batch)[0])[0], tf.float64)
        self.divisors = [tf.zeros([], tf.float64)] * losses + [rows * _present()]
        self.terms: list[Any] = [tf.zeros([], tf.float64)] * (losses + 1)
        self.elements: list[Any] = []
        self.outputs: list[Any] = []
        self.loss: Any = None
        self._scales = scales

    def weighted(self, part: int, loss: Any) -> tf.Tensor:
        """Return a part of the loss times this batch's share in that part."""
        loss = tf.reduce_sum(loss)
        loss *= tf.cast(self._scales[part], loss.dtype)
        self.terms[part] += tf.cast(loss, tf.float64)
        return loss

    def add(self, aggregate: Callable[..., Any], model: Any, loss: Any) -> tf.Tensor:
        """Replace a model's ``_aggregate_additional_loss``: weight the added loss by rows."""
        return self.weighted(-1, aggregate(model, loss))


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of a model as a function of its variables.

    Args:
        model: a compiled model, or any model if ``own`` is given.
        variables: the variables of the model that the loss is a function of.
        training: whether layers behave as in training.
        penalties: the added losses that count: "regularizers", "add_loss".
        own: the user's loss, which replaces the compiled one.
    """

    model: Any
    variables: Sequence[Any]
    training: bool
    penalties: frozenset[str]
    own: OwnLoss | None = None

    @property
    def losses(self) -> int:
        """Number of compiled losses; each has its own divisor."""
        compiled = compiled_loss(self.model)
        return len(losses_of_outputs(compiled)) if self._is_of_keras and compiled is not None else 0

    @property
    def _is_of_keras(self) -> bool:
        """Whether Keras adds up the losses, not a function or a ``compute_loss`` of the user."""
        return self.own is None and not has_own_loss(self.model)

    def values(self, moved: Sequence[tf.Tensor] | None) -> list[tf.Tensor]:
        """Return the values of the variables, plus ``moved`` if it is given."""
        values = [tf.convert_to_tensor(native(v)) for v in self.variables]
        if moved is None:
            return [tf.identity(v) for v in values]
        return [v + by for v, by in zip(values, moved, strict=True)]

    def on_batch(
        self,
        values: Sequence[tf.Tensor],
        batch: Any,
        number: Any,
        scales: Any,
        draw: Draw | None = None,
    ) -> Parts:
        """Return the contribution of this replica's part of a batch. The model's variables stay as
        they are.

        Args:
            values: values of the variables.
            batch: this replica's part of the batch.
            number: index of the batch.
            scales: for each part of the loss, the share of this batch in it.
            draw: makes targets from predictions, which replace the true targets.
        """
        parts = Parts(batch, scales, self.losses)
        moved = zip(self.variables, values, strict=True)
        state = [*regularized(self.model), *moved, *self._seeds(number)]
        with keras.StatelessScope(state, collect_losses=True, initialize_variables=False):
            if self.own is not None:
                parts.loss = parts.weighted(-1, self._own_loss(parts, self.own, batch))
            else:
                self._compiled(parts, batch, draw)
        return parts

    def _own_loss(self, parts: Parts, own: OwnLoss, batch: Any) -> Any:
        def mean() -> Any:
            loss = tf.convert_to_tensor(own(self.model, batch))
            if loss.shape.rank == 0:
                return loss
            parts.elements.append(loss)
            return tf.reduce_mean(loss)

        strategy = tf.distribute.get_strategy()
        ours = None if strategy.num_replicas_in_sync == 1 else scaling(strategy)
        return mean() if ours is None else ours.part_of_mean(mean)

    def _compiled(self, parts: Parts, batch: Any, draw: Draw | None) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        told = {"training": self.training} if takes_training(self.model) else {}
        # Copy the outputs. A derivative of the loss by an output ignores other outputs and
        # penalties that the model computes from that output.
        y_pred = tf.nest.map_structure(copy_of, self.model(x, **told))
        parts.outputs = [one for one in tf.nest.flatten(y_pred) if one.dtype.is_floating]
        with self._in_parts(parts, draw):
            loss = loss_of_batch(
                self.model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight,
                training=self.training,
            )  # fmt: skip
        parts.loss = tf.reduce_sum(loss) if self._is_of_keras else parts.weighted(-1, loss)

    def _seeds(self, number: Any) -> Iterator[tuple[Any, tf.Tensor]]:
        """Yield the random states of layers: different in each batch, equal in each pass."""
        for variable in self.model.variables if self.training else ():
            if path_of(variable).endswith(LAYER_SEED):
                state = tf.convert_to_tensor(native(variable))
                step = tf.stack([tf.zeros([], state.dtype), tf.cast(number, state.dtype)])
                yield variable, state + _STRIDE * step

    @contextlib.contextmanager
    def _in_parts(self, parts: Parts, draw: Draw | None) -> Iterator[None]:
        """Weight each part of the model's loss while the block runs."""
        with contextlib.ExitStack() as stack:
            if self._is_of_keras:
                if self.losses:
                    compiled = compiled_loss(self.model)
                    flat = [
                        one._replace(loss=_Part(parts, place, one, draw), loss_weights=None)
                        for place, one in enumerate(losses_of_outputs(compiled))
                    ]
                    stack.enter_context(hooks.LOSS_PARTS.showing(compiled, flat))
                stack.enter_context(hooks.ADDED_LOSSES.on(self.model, parts.add))
            if "regularizers" not in self.penalties:
                stack.enter_context(hooks.REGULARIZATION_LOSSES.on(self.model, _none))
            if "add_loss" not in self.penalties:
                for layer in [self.model, *layers_of(self.model)]:
                    stack.enter_context(hooks.OWN_LOSSES.on(layer, _none))
            yield


def has_own_loss(model: Any) -> bool:
    """Return whether the user has replaced the model's ``compute_loss``."""
    return overrides(model, "compute_loss")


def _none(_: Callable[..., Any], __: Any) -> list[Any]:
    return []


class _Part:
    """A compiled loss that is weighted by the batch's share in its divisor."""

    def __init__(self, parts: Parts, place: int, compiled: Any, draw: Draw | None) -> None:
        self._parts, self._place, self._draw = parts, place, draw
        self._loss = self.wrapped = compiled.loss
        self._weight = compiled.loss_weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        parts, place = self._parts, self._place
        if self._draw is not None:
            y_true = self._draw(innermost_loss(self._loss), y_pred, place)
        parts.divisors[place] = parts.divisors[-1]
        elements = None

        def reduce(call: Any, losses: Any, how: Reduction) -> Any:
            # A loss may compute other losses. Its own reduction is the last one.
            nonlocal elements
            elements, parts.divisors[place] = losses, _divisor(how, parts.divisors[-1])
            return call(losses, how)

        with reducing(reduce):
            loss = self._loss(y_true, y_pred, sample_weight)
        parts.elements.append(elements)
        return parts.weighted(place, loss if self._weight is None else loss * self._weight)


def _divisor(how: Reduction, rows: tf.Tensor) -> tf.Tensor:
    if not how.is_mean:
        return tf.zeros([], tf.float64)
    held = how.divisor()
    return rows if held is None else tf.cast(held, tf.float64) * _present()


def _present() -> tf.Tensor:
    """Return 1, or 0 on a replica without rows, which works on a borrowed row."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return tf.cast(tf.ones([]) / replicas > 0, tf.float64)
