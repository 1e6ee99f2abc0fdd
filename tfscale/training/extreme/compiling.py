"""Optimizers, losses and metrics of a MACH's models: each model has its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import keras

from tfscale.training.extreme.losses import MultiHot, MultiHotMetric

_ACCURACY = ("accuracy", "acc", "binary_accuracy")


def of_one_model(given: Mapping[str, Any], buckets: int, multilabel: bool) -> dict[str, Any]:
    """Return arguments of ``keras.Model.compile`` for one model, with new objects.

    Args:
        given: arguments of ``MACH.compile``.
        buckets: number of buckets.
        multilabel: whether samples have several labels.
    """
    found = dict(given)
    found["optimizer"] = _optimizer(given["optimizer"])
    found["loss"] = _loss(given.get("loss"), buckets, multilabel)
    for name in ("metrics", "weighted_metrics"):
        found[name] = _metrics(given.get(name), buckets if multilabel else None)
    return found


def _optimizer(given: Any) -> Any:
    if isinstance(given, keras.optimizers.Optimizer):
        return _copied(given)
    return given() if callable(given) else given


def _loss(given: Any, buckets: int, multilabel: bool) -> Any:
    if isinstance(given, (list, tuple, dict)) and len(given) == 1:  # models have one output
        (given,) = given.values() if isinstance(given, dict) else given
    if given is None:
        kind = "BinaryCrossentropy" if multilabel else "SparseCategoricalCrossentropy"
        given = getattr(keras.losses, kind)(from_logits=True)
    loss = _of_logits(keras.losses.get(given))
    return MultiHot(_as_object(loss), buckets) if multilabel else loss


def _of_logits(loss: Any) -> Any:
    """Return a loss that takes logits; by its name or as a function, Keras's take probabilities."""
    if isinstance(loss, keras.losses.Loss):
        if loss.get_config().get("from_logits") is False:
            name = type(loss).__name__
            raise ValueError(
                f"loss {name} takes probabilities, and the models of a MACH end in logits; pass "
                f"{name}(from_logits=True)"
            )
        return loss
    parameter = inspect.signature(loss).parameters.get("from_logits")
    if parameter is None or parameter.default is not False:
        return loss
    return functools.wraps(loss)(functools.partial(loss, from_logits=True))


def _as_object(loss: Any) -> Any:
    if isinstance(loss, keras.losses.Loss):
        return loss

    class Given(keras.losses.Loss):
        """A user's function as a loss."""

        def call(self, y_true: Any, y_pred: Any) -> Any:
            return loss(y_true, y_pred)

    return Given(name=getattr(loss, "__name__", "loss"))


def _metrics(given: Any, buckets: int | None) -> Any:
    """Return metrics of one model; of rows of zeros and ones, if a number of buckets is given."""
    if callable(given) and not isinstance(given, keras.metrics.Metric):
        given = given()
    made = keras.tree.map_structure(_copied, given)
    if buckets is None or given is None:
        return made
    return keras.tree.map_structure(
        lambda metric: MultiHotMetric(_metric_of_logits(metric), buckets), made
    )


def _metric_of_logits(metric: Any) -> Any:
    if isinstance(metric, str) and metric in _ACCURACY:
        return keras.metrics.BinaryAccuracy(name=metric, threshold=0.0)
    metric = keras.metrics.get(metric)
    if isinstance(metric, keras.metrics.Metric):
        return metric
    return keras.metrics.MeanMetricWrapper(metric, name=getattr(metric, "__name__", "metric"))


def _copied(given: Any) -> Any:
    """Return a new object like an optimizer or a metric, since models cannot share one."""
    if not isinstance(given, (keras.optimizers.Optimizer, keras.metrics.Metric)):
        return given
    kind = type(given)
    try:
        return kind.from_config(given.get_config())
    except (TypeError, NotImplementedError) as error:
        word = "optimizer" if isinstance(given, keras.optimizers.Optimizer) else "metrics"
        raise ValueError(
            f"{word} has a {kind.__name__} that cannot be made anew for each model, since its "
            f"get_config does not have all arguments of its constructor ({error}); complete "
            f"get_config, or pass {word}=<a function that returns new ones>"
        ) from error
