"""Losses of Keras on one of several replicas, and the metrics that are told of them.

Keras divides a mean loss by the number of replicas, wherever a loss object is called. Inside a step
that number is a ``Share``, and so the loss is weighted by what the replica holds of the batch.
While a step is traced, this module also changes the following:

- A loss object with a mask, or one that divides by its weights, is weighted by these: a compiled
  loss, and one that the model or a layer holds as an attribute.
- A loss passed to ``add_loss`` is scaled once: not again if a loss object has scaled it.
- A user's own ``compute_loss`` is scaled as own_losses.py says.
- A metric that averages one number for a batch weighs it by the replica's share, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.losses import sums, watched
from tfscale.bridge.objects import Trainer
from tfscale.bridge.protocols import Layer, Metric
from tfscale.bridge.shadow import shadowed
from tfscale.strategy import inexact, own_losses
from tfscale.strategy.current import current, during
from tfscale.strategy.share import Share, is_scaled


@contextlib.contextmanager
def weighted(model: keras.Model, layers: list[Layer]) -> Iterator[None]:
    """Within this context losses and their metrics are parts of the whole batch's."""
    with contextlib.ExitStack() as stack:
        losses = getattr(model, "_compile_loss", None)
        if losses is not None and losses.built:
            flat = [one._replace(loss=_Weighted(one.loss)) for one in losses._flat_losses]
            stack.enter_context(shadowed(losses, "_flat_losses", flat))
        for owner in [model, *layers]:
            for name, loss in [*vars(owner).items()]:
                if isinstance(loss, keras.losses.Loss) and loss is not losses:
                    stack.enter_context(shadowed(owner, name, _Shared(loss)))
        for metric in {id(one): one for one in [*model.metrics, model._loss_tracker]}.values():
            stack.enter_context(shadowed(metric, "result", functools.partial(_result, metric)))
            if getattr(type(metric), "update_state", None) is keras.metrics.Mean.update_state:
                update = functools.partial(_update_mean, metric)
                stack.enter_context(shadowed(metric, "update_state", update))
        stack.enter_context(
            shadowed(model, "compute_loss", functools.partial(_compute_loss, model))
        )
        added = functools.partial(_aggregate_additional_loss, model)
        stack.enter_context(shadowed(model, "_aggregate_additional_loss", added))
        if model.run_eagerly:
            for layer in layers:
                add = functools.partial(_add_loss, layer)
                stack.enter_context(shadowed(layer, "add_loss", add))
        yield


def _in_step() -> bool:
    return isinstance(current.count, Share)


def _compute_loss(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    since = current.reads
    loss = type(model).compute_loss(model, *args, **kwargs)
    if loss is None or not _in_step():
        return loss
    of_keras = type(model).compute_loss is keras.Model.compute_loss
    return own_losses.scaled_loss(loss, since, sums=of_keras or loss.shape.rank > 0)


def _aggregate_additional_loss(model: keras.Model, loss: Any) -> Any:
    eager = tf.executing_eagerly()
    scaled = id(loss) in current.scaled if eager else _in_step() and is_scaled(loss)
    kind = Trainer if scaled else type(model)  # a Trainer adds up; TensorFlow's also scales
    return kind._aggregate_additional_loss(model, loss)


def _add_loss(layer: Layer, loss: Any) -> Any:
    """Eager steps have no graph: there, a loss counts as scaled if the share was just read."""
    if current.reads > current.noted:
        current.scaled.update(id(one) for one in tf.nest.flatten(loss))
    current.noted = current.reads
    return type(layer).add_loss(layer, loss)


def _update_mean(metric: Metric, values: Any, sample_weight: Any = None) -> Any:
    """Weight a metric's numbers by the replica's share, if there is one number for a batch.

    Such a number is a mean over the batch's samples; if it was scaled, that is undone first. With
    ``reduction="none"`` Keras does not divide losses by the number of replicas, but multiplies by
    it what it logs: the loss tracker gets them divided.
    """
    if _in_step() and tf.is_tensor(values) and values.dtype.is_floating:
        share = current.count.weight(values.dtype)
        # Eagerly it cannot be seen that Keras has scaled back what it weighs by samples.
        scaled_back = tf.executing_eagerly() and sample_weight is not None
        if values.shape.rank == 0:
            if not scaled_back and is_scaled(values):
                values = tf.math.divide_no_nan(values, share)
            if sample_weight is None:
                sample_weight = share
        elif metric is current.model._loss_tracker:
            values = values * share
    return type(metric).update_state(metric, values, sample_weight=sample_weight)


def _result(metric: Metric) -> Any:
    result = type(metric).result(metric)
    if current.results is not None:
        named = result if isinstance(result, dict) else {None: result}  # of compiled metrics
        current.results |= {id(value): (metric, name, value) for name, value in named.items()}
    return result


def with_results_of_all(logs: Any) -> tuple[Any, set[int]]:
    """What a step returns, in which the results of metrics are those of all replicas.

    If a step returns just the model's metrics, nothing is changed: Keras reads them afterwards.

    Returns:
        The same, and the ids of what in it are results of metrics.
    """
    found, current.results = current.results or {}, None
    if not isinstance(logs, dict) or set(logs) == set(current.model.get_metrics_result()):
        return logs, set(found)
    told = {name: found[id(value)] for name, value in logs.items() if id(value) in found}
    metrics = {id(metric): metric for metric, _, _ in told.values()}
    with during(together=True, rows=None):  # what a replica without rows has counted, counts
        totals = {key: metric.result() for key, metric in metrics.items()}
    of_all = {
        name: totals[id(metric)] if part is None else totals[id(metric)][part]
        for name, (metric, part, _) in told.items()
    }
    return logs | of_all, {id(value) for value in of_all.values()}


class _Shared:
    """A loss object that knows what it divides by: by samples, what a mask leaves, or weights."""

    def __init__(self, loss: Any) -> None:
        self._loss = self.wrapped = loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if not _in_step():
            return self._loss(y_true, y_pred, sample_weight)
        return self._with_share(y_true, y_pred, sample_weight)[0]

    def _with_share(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Share]:
        """The loss, scaled by this replica's share if it is a mean of several; and that share."""

        def tell(_: Any, held: Any) -> None:
            if held is not None:
                current.count = self._share(held)

        with during(count=current.count), watched(self._loss, y_pred, sample_weight, tell):
            return self._loss(y_true, y_pred, sample_weight), current.count

    def _share(self, held: tf.Tensor) -> Share:
        """This replica's share of the divisor, where that is not its samples."""
        share: Share = current.count
        held = current.rows.counted(held)
        total = tf.distribute.get_replica_context().all_reduce("SUM", held)
        return Share(int(share), held, total)


class _Weighted(_Shared):
    """A loss that is compiled: it is scaled in any case."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if not _in_step():
            return self._loss(y_true, y_pred, sample_weight)
        since = current.reads
        loss, share = self._with_share(y_true, y_pred, sample_weight)
        if is_scaled(loss, since):
            return loss
        if sums(self._loss):
            return loss * share.present(loss.dtype)
        inexact.warn_of_a_number(self._loss)
        return loss * share.part(loss.dtype)
