"""Losses of Keras on one of several replicas, and the metrics that are computed from losses.

Keras divides a mean loss by the number of replicas, wherever a loss object is called. Inside a step
that number is a ``Share``, and so the loss is weighted by the replica's share of the batch. While a
step is traced, this module also changes the following:

- The share is computed from the divisor of a loss object: the number of samples, the number of
  unmasked elements, or the sum of weights. However a program calls a loss object, one function of
  Keras reduces its losses.
- The loss of ``add_loss``, or of a user's own ``compute_loss``, is weighted term by term:
  own_losses.py.
- A metric that averages or sums one number for a batch gets the replica's part of this number.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.losses import Reduction, sum_of_losses
from tfscale.bridge.models import overrides
from tfscale.bridge.objects import is_variable, loss_tracker, read_value
from tfscale.bridge.protocols import Layer, Metric
from tfscale.strategy.losses import own_losses
from tfscale.strategy.losses.functions import Function, function_of_results
from tfscale.strategy.share import Share
from tfscale.strategy.step import during, this_step

Compute = Callable[..., Any]

_ADDED_IN = "_tfscale_added_in"  # attribute of an eager tensor: losses of the step that adds it


@contextlib.contextmanager
def weighted(model: keras.Model, layers: list[Layer]) -> Iterator[None]:
    """Make losses and their metrics parts of those of the whole batch within this context."""
    with contextlib.ExitStack() as stack:
        for metric in {id(one): one for one in [*model.metrics, loss_tracker(model)]}.values():
            stack.enter_context(hooks.RESULT.on(metric, _result))
        stack.enter_context(hooks.UPDATE_MEAN.on(keras.metrics.Mean, _update_mean))
        stack.enter_context(hooks.UPDATE_SUM.on(keras.metrics.Sum, _update_sum))
        stack.enter_context(hooks.COMPUTE_LOSS.on(model, _compute_loss))
        stack.enter_context(hooks.ADDED_LOSSES.on(model, _add_up_losses))
        if model.run_eagerly:
            for layer in layers:
                stack.enter_context(hooks.ADD_LOSS.on(layer, _add_loss))
        yield


def reduced(call: Callable[..., Any], losses: Any, how: Reduction) -> Any:
    """Reduce the losses of this replica's elements to its part of the whole batch's loss."""
    step = this_step()
    if step.share is None:
        return call(losses, how)
    since, one_number = step.share.reads, losses.shape.rank == 0
    if how.is_mean and not one_number:
        with during(dataclasses.replace(step, share=_share_of(losses, how))):
            return call(losses, how)
    loss = call(losses, how)
    if how.reduction == "sum" and not one_number:
        return loss * step.share.present(loss.dtype)
    if how.is_mean and not (tf.executing_eagerly() and step.is_scaled(loss, since)):
        return own_losses.one_loss_for_all(loss)
    return loss


def _share_of(losses: tf.Tensor, how: Reduction) -> Share:
    held, step = how.divisor(), this_step()
    return step.share_of_elements(losses) if held is None else step.share_of_divisor(held)


def _compute_loss(compute: Compute, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    step = this_step()
    since = 0 if step.share is None else step.share.reads
    loss = compute(model, *args, **kwargs)
    if loss is None or step.share is None:
        return loss
    of_keras = not overrides(model, "compute_loss")
    if of_keras and loss.shape.rank > 0:  # reduction="none": metrics need one loss per sample
        return loss if step.is_scaled(loss, since) else loss * step.share.present(loss.dtype)
    return own_losses.scaled_loss(loss, since, sums=of_keras or loss.shape.rank > 0)


def _add_up_losses(add_up: Compute, model: keras.Model, loss: Any) -> Any:
    """Add up losses of layers; ``add_up`` of TensorFlow's trainer also scales them."""
    step = this_step()
    if tf.executing_eagerly():
        if getattr(loss, _ADDED_IN, step.losses) is not step.losses:
            return tf.zeros_like(loss)  # another replica has added it, and counts it
        is_scaled = id(loss) in step.losses.scaled
        return sum_of_losses(model, loss) if is_scaled else add_up(model, loss)
    total = sum_of_losses(model, loss)
    return total if step.share is None else own_losses.scaled_loss(total)


def _add_loss(add_loss: Compute, layer: Layer, loss: Any) -> Any:
    """Record an added loss as scaled if the share was just read: eager steps have no graph.

    Record the step, too: eager replicas that exchange numbers take turns, and a layer keeps the
    losses that all of them add.
    """
    step = this_step()
    for one in filter(tf.is_tensor, tf.nest.flatten(loss)):
        setattr(one, _ADDED_IN, step.losses)
    if step.of_rows.reads > step.losses.reads_before:
        step.losses.scaled.update(id(one) for one in tf.nest.flatten(loss))
    step.losses.reads_before = step.of_rows.reads
    return add_loss(layer, loss)


def _update_mean(
    original: Callable[..., Any], metric: Metric, values: Any, sample_weight: Any = None
) -> Any:
    """Weight a metric's numbers by the replica's share, if there is one number for a batch.

    Such a number is a mean over the batch's samples. If it was scaled, the scaling is undone first.
    With ``reduction="none"`` Keras does not divide losses by the number of replicas, but multiplies
    the logged loss by that number. So the loss tracker gets losses that are divided.
    """
    step, all_have_it, values = this_step(), _all_have(values), _floating(values, metric)
    if step.share is not None and all_have_it:
        sample_weight = step.share.weight() if sample_weight is None else sample_weight
    elif step.share is not None and _is_floating(values):
        of_rows = step.share.weight(values.dtype)
        if values.shape.rank == 0:
            values = _of_one_replica(values, of_rows, sample_weight)
            if sample_weight is None:
                sample_weight = of_rows
        elif metric is loss_tracker(step.model):
            values = values * of_rows * step.share.copies
    return original(metric, values, sample_weight=sample_weight)


def _update_sum(
    original: Callable[..., Any], metric: Metric, values: Any, sample_weight: Any = None
) -> Any:
    """Add a replica's part to a sum, if a metric gets one number for a batch."""
    share, all_have_it, values = this_step().share, _all_have(values), _floating(values, metric)
    if share is not None and all_have_it:
        weight = share.weight()
        values = weight * tf.cast(values, weight.dtype) * share.copies  # of which one counts
    elif share is not None and _is_floating(values) and values.shape.rank == 0:
        if sample_weight is None:
            values = own_losses.number_of_all(values) * share.copies
        else:
            of_rows = share.weight(values.dtype)
            values = _of_one_replica(values, of_rows, sample_weight)
    return original(metric, values, sample_weight=sample_weight)


def _all_have(values: Any) -> bool:
    """Return whether a metric gets a number that all replicas have, such as a learning rate."""
    return isinstance(values, (int, float)) or (is_variable(values) and not values.shape)


def _floating(values: Any, metric: Metric) -> Any:
    """Return what a metric gets as a tensor, and a whole number as the metric counts it."""
    values = read_value(values)
    is_whole = tf.is_tensor(values) and values.dtype.is_integer and values.shape.rank == 0
    return tf.cast(values, metric.dtype) if is_whole else values


def _is_floating(values: Any) -> bool:
    return bool(tf.is_tensor(values) and values.dtype.is_floating)


def _of_one_replica(value: tf.Tensor, of_rows: tf.Tensor, sample_weight: Any) -> tf.Tensor:
    """Return a number whose mean over replicas, weighted by rows, is the batch's number."""
    if tf.executing_eagerly():
        # Keras undoes the scaling of a number that it logs with sample weights. An eager step has
        # no graph that shows this.
        scaled = sample_weight is None and this_step().is_scaled(value)
        return tf.math.divide_no_nan(value, of_rows) if scaled else value
    return tf.math.divide_no_nan(own_losses.number_of_all(value), of_rows)


# ------------------------------------------------------------------------ results


@dataclasses.dataclass(frozen=True)
class _Reading:
    """State that a replica's metric had when its result was computed.

    Attributes:
        metric: metric of the model.
        held: variables that count samples, with their values at that moment.
    """

    metric: Any
    held: list[tuple[Any, tf.Tensor]]

    def of_all(self, totals: Iterator[tf.Tensor]) -> Any:
        """Return the result that the metric has if its variables hold these totals."""
        state = [(variable, next(totals)) for variable, _ in self.held]
        with keras.StatelessScope(state):
            result = type(self.metric).result(self.metric)
            return tf.nest.map_structure(tf.convert_to_tensor, result)


def _result(compute: Compute, metric: Metric) -> Any:
    result = compute(metric)
    results = this_step().losses.results
    if results is not None:
        reading = _Reading(metric, [(v, tf.identity(v.value)) for v in counting_variables(metric)])
        named = result if isinstance(result, dict) else {None: result}  # compiled metrics: dict
        results |= {id(value): (reading, name, value) for name, value in named.items()}
    return result


def counting_variables(metric: Any) -> list[Any]:
    """Return the variables of a metric that hold each replica's part of a sum."""
    summed = tf.VariableAggregation.SUM
    return [v for v in metric.variables if getattr(v.value, "aggregation", None) == summed]


def with_results_of_all(logs: Any) -> tuple[Any, set[int]]:
    """Replace the results of metrics in a step's logs by the results over all replicas.

    Logs that hold just the model's metrics stay as they are: Keras reads these metrics afterwards.

    Returns:
        The logs, and the ids of the values in the logs that are results of metrics.
    """
    step = this_step()
    found, step.losses.results = step.losses.results or {}, None
    if not isinstance(logs, dict) or set(logs) == set(step.model.get_metrics_result()):
        return logs, set(found)
    values = tf.nest.flatten(logs)  # the result of compiled metrics is a dict
    logged = {i: found[id(value)] for i, value in enumerate(values) if id(value) in found}
    computed = _computed_from_results(values, found)
    used = [*logged.values(), *(found[id(x)] for one in computed.values() for x in one.leaves)]
    readings = {id(reading): reading for reading, _, _ in used}
    held = [tensor for reading in readings.values() for _, tensor in reading.held]
    # Samples that a now empty replica counted earlier still count.
    with during(dataclasses.replace(step, rows=None)):
        totals = iter(tf.distribute.get_replica_context().all_reduce("SUM", held) if held else [])
    results = {key: reading.of_all(totals) for key, reading in readings.items()}

    def of_all(reading: _Reading, part: str | None, _: Any) -> tf.Tensor:
        return results[id(reading)] if part is None else results[id(reading)][part]

    for i, one in logged.items():
        values[i] = of_all(*one)
    for i, function in computed.items():
        values[i] = function.of({x.ref(): of_all(*found[id(x)]) for x in function.leaves})
    ids = {id(values[i]) for i in [*logged, *computed]}
    return tf.nest.pack_sequence_as(logs, values), ids


def _computed_from_results(
    values: Sequence[Any], found: Mapping[int, tuple[_Reading, str | None, Any]]
) -> dict[int, Function]:
    """Return, by their places, the functions that give logs from results of metrics."""
    given = [result for _, _, result in found.values()]
    if tf.executing_eagerly() or not all(isinstance(x, tf.Tensor) for x in given):
        return {}
    results = {x.ref() for x in given}
    traced = {i: x for i, x in enumerate(values) if isinstance(x, tf.Tensor)}
    functions = {i: function_of_results(x, results) for i, x in traced.items()}
    return {i: function for i, function in functions.items() if function is not None}
