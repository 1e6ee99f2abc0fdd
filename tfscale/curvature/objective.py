r"""The loss of a model on a batch, as a function of some of its variables.

A mean over all data is the sum of what batches hold of it:
:math:`L = \sum_b \frac{d_b}{\sum_c d_c} L_b`, with the loss :math:`L_b` of a batch and what it
divides by, :math:`d_b`: the number of rows; or what a mask leaves, or the sum of weights, as Keras
has it. With several compiled losses each has its own :math:`d_b`, and what layers and regularizers
add goes by rows. So a batch's loss is weighted part by part.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.losses import Reduction, innermost_loss, reducing
from tfscale.bridge.objects import LAYER_SEED, copy_of, layers_of, native, path_of
from tfscale.bridge.shadow import around, shadowed

# Of a model and a batch, as ``fit`` gives it to a step, the losses of its rows, or their mean.
OwnLoss = Callable[[Any, Any], Any]
# Of a loss object, predictions, and the number of this loss among all: other targets.
Draw = Callable[[Any, tf.Tensor, int], tf.Tensor]

_STRIDE = 7919  # between the states from which batches draw


class Parts:
    """What this replica's part of a batch adds to the loss, part by part.

    Attributes:
        loss: all that it adds.
        divisors: what each part divides by, of this replica's rows; rows come last.
        terms: what each part adds.
        elements: of each loss the losses of all elements, before they are reduced, if it tells.
        outputs: of the model.
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
        """A part of the loss times the share of this batch in it."""
        loss = tf.reduce_sum(loss)
        loss *= tf.cast(self._scales[part], loss.dtype)
        self.terms[part] += tf.cast(loss, tf.float64)
        return loss

    def add(self, aggregate: Callable[[Any], Any], loss: Any) -> tf.Tensor:
        """In place of a model's ``_aggregate_additional_loss``."""
        return self.weighted(-1, aggregate(loss))


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of a model.

    Args:
        model: compiled, or with a loss of one's own.
        variables: of the model, of which the loss is a function.
        training: whether layers do what they do while training.
        penalties: of what is added to the compiled loss, what counts: "regularizers", "add_loss".
        own: a loss in place of the compiled one.
    """

    model: Any
    variables: Sequence[Any]
    training: bool
    penalties: frozenset[str]
    own: OwnLoss | None = None

    @property
    def losses(self) -> int:
        """How many compiled losses there are, each with a divisor of its own."""
        compiled = self.model._compile_loss
        return len(compiled._flat_losses) if self._is_of_keras and compiled is not None else 0

    @property
    def _is_of_keras(self) -> bool:
        """Whether Keras adds up losses, and not a function or a ``compute_loss`` of the user's."""
        return self.own is None and not has_own_loss(self.model)

    def values(self, moved: Sequence[tf.Tensor] | None) -> list[tf.Tensor]:
        """What the variables are, or would be if they were moved."""
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
        """What this replica's part of a batch adds to the loss. No variable of the model changes.

        Args:
            values: of the variables.
            batch: this replica's part.
            number: that of the batch.
            scales: of each part of the loss, the share that this batch has in it.
            draw: makes targets from predictions, in place of the true ones.
        """
        parts = Parts(batch, scales, self.losses)
        state = [*zip(self.variables, values, strict=True), *self._seeds(number)]
        with keras.StatelessScope(state, collect_losses=True, initialize_variables=False):
            if self.own is not None:
                parts.loss = parts.weighted(-1, self._of_ones_own(parts, self.own, batch))
            else:
                self._compiled(parts, batch, draw)
        return parts

    def _of_ones_own(self, parts: Parts, own: OwnLoss, batch: Any) -> Any:
        def mean() -> Any:
            loss = tf.convert_to_tensor(own(self.model, batch))
            if loss.shape.rank == 0:
                return loss
            parts.elements.append(loss)
            return tf.reduce_mean(loss)

        strategy = tf.distribute.get_strategy()
        return mean() if strategy.num_replicas_in_sync == 1 else strategy.part_of_mean(mean)

    def _compiled(self, parts: Parts, batch: Any, draw: Draw | None) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        told = {"training": self.training} if self.model._call_has_training_arg else {}
        # Copies: a derivative of the loss by an output leaves out what is computed from that output
        # within the model, such as another output, or a penalty on it.
        y_pred = tf.nest.map_structure(copy_of, self.model(x, **told))
        parts.outputs = [one for one in tf.nest.flatten(y_pred) if one.dtype.is_floating]
        with self._in_parts(parts, draw):
            loss = self.model._compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=self.training
            )
        parts.loss = tf.reduce_sum(loss) if self._is_of_keras else parts.weighted(-1, loss)

    def _seeds(self, number: Any) -> Iterator[tuple[Any, tf.Tensor]]:
        """States of random numbers: of each batch another one, and the same in each pass."""
        for variable in self.model.variables if self.training else ():
            if path_of(variable).endswith(LAYER_SEED):
                state = tf.convert_to_tensor(native(variable))
                step = tf.stack([tf.zeros([], state.dtype), tf.cast(number, state.dtype)])
                yield variable, state + _STRIDE * step

    @contextlib.contextmanager
    def _in_parts(self, parts: Parts, draw: Draw | None) -> Iterator[None]:
        """While it lasts, the model weights its loss part by part."""
        with contextlib.ExitStack() as stack:
            if self._is_of_keras:
                if self.losses:
                    compiled = self.model._compile_loss
                    flat = [
                        one._replace(loss=_Part(parts, place, one, draw), loss_weights=None)
                        for place, one in enumerate(compiled._flat_losses)
                    ]
                    stack.enter_context(shadowed(compiled, "_flat_losses", flat))
                added = around(self.model, "_aggregate_additional_loss", parts.add)
                stack.enter_context(added)
            if "regularizers" not in self.penalties:
                stack.enter_context(shadowed(self.model, "_get_regularization_losses", list))
            if "add_loss" not in self.penalties:
                for layer in [self.model, *layers_of(self.model)]:
                    stack.enter_context(shadowed(layer, "_get_own_losses", list))
            yield


def has_own_loss(model: Any) -> bool:
    """Whether its class computes losses in a way of its own."""
    return type(model).compute_loss is not keras.Model.compute_loss


class _Part:
    """A compiled loss that is weighted by the batch's share in all that it divides by."""

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
        rows = parts.divisors[-1]

        parts.divisors[place] = rows

        def reduce(call: Any, losses: Any, how: Reduction) -> Any:
            parts.elements.append(losses)
            held = how.divisor()
            if not how.is_mean:
                parts.divisors[place] = tf.zeros([], tf.float64)
            elif held is not None:
                parts.divisors[place] = tf.cast(held, tf.float64) * _present()
            return call(losses, how)

        with reducing(reduce):
            loss = self._loss(y_true, y_pred, sample_weight)
        return parts.weighted(place, loss if self._weight is None else loss * self._weight)


def _present() -> tf.Tensor:
    """1, or 0 on a replica that holds nothing of the batch, and works on a row that it was lent."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return tf.cast(tf.ones([]) / replicas > 0, tf.float64)
