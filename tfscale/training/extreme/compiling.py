"""Optimizers, losses and metrics of a MACH's models: each model has its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import keras

from tfscale.training.extreme.losses import MultiHot, MultiHotMetric

_ACCURACY = ("accuracy", "acc", "binary_accuracy")
_OF_LOSSES = ("accuracy", "acc", "crossentropy", "ce")  # names that Keras takes by the loss
_OF_LOGITS = {"from_logits": True, "thresholds": 0.0}  # arguments of metrics of probabilities


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

    return Given(name=_name_of(loss, "loss"))


def _name_of(function: Any, other: str) -> str:
    """Return the name of a function; another one for a lambda, which has none."""
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() else other


def _metrics(given: Any, buckets: int | None) -> Any:
    """Return metrics of one model; of rows of zeros and ones, if a number of buckets is given."""
    if callable(given) and not isinstance(given, keras.metrics.Metric):
        given = given()
    if given is None:
        return None
    if buckets is None:
        return keras.tree.map_structure(lambda each: _by_name(_copied(each)), given)
    return keras.tree.map_structure(
        lambda each: MultiHotMetric(_metric_of_logits(_copied(each)), buckets), given
    )


def _metric_of_logits(metric: Any) -> Any:
    if isinstance(metric, str) and metric in _ACCURACY:
        return keras.metrics.BinaryAccuracy(name=metric, threshold=0.0)
    metric = keras.metrics.get(_by_name(metric))
    if isinstance(metric, keras.metrics.Metric):
        return metric
    return keras.metrics.MeanMetricWrapper(metric, name=_name_of(metric, "metric"))


def _by_name(metric: Any) -> Any:
    """Return for a name of Keras a metric of logits, if Keras's takes probabilities."""
    if not isinstance(metric, str) or metric in _OF_LOSSES:
        return metric
    found = keras.metrics.get(metric)
    if not isinstance(found, keras.metrics.Metric):
        return metric
    config = found.get_config()
    of_logits = {key: value for key, value in _OF_LOGITS.items() if key in config}
    return type(found).from_config({**config, "name": metric, **of_logits})


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
