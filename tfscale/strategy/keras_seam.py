"""Where the strategy meets Keras: what makes ``fit`` on k replicas equal to one device.

Keras hands every step to ``Strategy.run``. While a step is traced (or runs, eagerly)
some objects of the model get attributes that shadow their methods; when it is over
these are gone. No class and no module is changed, nothing of it is saved, and
optimizers stay what they are. Three things are set right:

- An optimizer's ``apply`` gets gradients that have been summed over all replicas, so
  that clipping, decay and loss scaling see what they see on one device. Gradients that
  accumulate are summed once, at the end of their window.
- Losses are weighted by what a replica really holds of the global batch: of its
  samples, its unmasked steps or its sample weights. See share.py.
- Statistics of layers are averaged; batch normalization normalizes by the global batch.

Keras's private names stand in this file alone; ``tests/strategy/test_private.py``
guards them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from tfscale.keras_objects import innermost
from tfscale.strategy import inexact
from tfscale.strategy.frames import called_by, caller, frames
from tfscale.strategy.gradients import Reducer
from tfscale.strategy.memory import Memory
from tfscale.strategy.share import Share
from tfscale.strategy.step import during, step

OPTIMIZERS = keras.optimizers.Optimizer

TRAINING = "train_step"
EVALUATION = "test_step"


def model_of(fn: Callable[..., Any]) -> Any:
    """The model whose step this is, or None."""
    owner = getattr(fn, "__self__", None)
    names = (TRAINING, EVALUATION)
    return owner if isinstance(owner, keras.Model) and fn.__name__ in names else None


def fit_that_begins() -> tuple[keras.Model, list[Any]] | None:
    """The model and the callbacks of the ``fit`` for which a dataset is distributed, or None."""
    for frame in frames(sys._getframe(1)):
        model = frame.f_locals.get("self")
        if isinstance(model, keras.Model) and frame.f_code.co_name in _ON_DATASETS:
            begins = frame.f_code.co_name == "fit"
            callbacks = frame.f_locals.get("callbacks")
            return (model, _listed(callbacks)) if begins else None
    return None


_ON_DATASETS = ("fit", "evaluate", "predict")


def _listed(callbacks: Any) -> list[Any]:
    return list(tf.nest.flatten(getattr(callbacks, "callbacks", callbacks) or []))


def layers_of(model: keras.Model) -> list[Any]:
    """All layers, those within others included."""
    return list(model._flatten_layers(include_self=False))


def holds_layers(layer: Any) -> bool:
    """Whether a layer is made of others."""
    return bool(layer._layers)


def wants_only_shapes() -> bool:
    """Whether Keras reads a batch of data for no more than its shapes."""
    return called_by("_maybe_symbolic_build")


def predicts() -> bool:
    """Whether Keras wants predictions, which it joins."""
    return called_by("one_step_on_data_distributed")


def generator_for(dataset: Any) -> Any:
    """The dataset of one batch that may be read before the others, if only once; or None.

    Keras reads a batch for its shapes and then begins anew. It keeps what it has seen of
    a generator for that, but not what is read ahead.
    """
    iterator = caller(EpochIterator)
    if iterator is None or not isinstance(iterator.data_adapter, GeneratorDataAdapter):
        return None
    return dataset._input_dataset.take(1)  # what is behind it reads ahead


def watch_seeds(strategy: Any) -> None:
    """The seeds of a model that is about to train are saved with its optimizer."""
    model = caller(keras.Model)
    for optimizer in optimizers_of(model) if model is not None else ():
        Memory.of(optimizer, strategy).watch(model)


def optimizers_of(model: keras.Model) -> list[Any]:
    """All optimizers that a model holds, in attributes or in lists of them."""
    found = {}
    for value in vars(model).values():
        values = value.values() if isinstance(value, dict) else value
        for one in values if isinstance(value, (list, tuple, dict)) else [value]:
            if isinstance(one, keras.optimizers.Optimizer):
                found[id(one)] = one
    return list(found.values())


@contextlib.contextmanager
def hooked(strategy: Any, optimizers: Iterable[Any]) -> Iterator[None]:
    """While it lasts, these optimizers apply sums over all replicas."""
    hooked = list(optimizers)
    for optimizer in hooked:
        vars(optimizer)["apply"] = functools.partial(_apply, strategy, optimizer)
        vars(optimizer)["_clip_gradients"] = functools.partial(_end_of_window, optimizer)
    try:
        yield
    finally:
        for optimizer in hooked:
            vars(optimizer).pop("apply", None)
            vars(optimizer).pop("_clip_gradients", None)


@contextlib.contextmanager
def exact(strategy: Any, model: keras.Model, training: bool) -> Iterator[None]:
    """While it lasts, a step of the model is a part of the step of the global batch."""
    if training:
        inexact.warn(strategy, layers_of(model))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_weighted_losses(strategy, model))
        if training:
            strategy.reducer.check_rules(model.trainable_variables)
            stack.enter_context(hooked(strategy, {*optimizers_of(model), *strategy.optimizers}))
        if training and strategy.synchronizes_batch_norm:
            stack.enter_context(_synchronized_batch_norm(model))
        yield


def step_of_replica(strategy: Any, fn: Callable[..., Any]) -> Any:
    """A model's step, which knows what part of the global batch it is."""

    @tf.autograph.experimental.do_not_convert
    def part(data: Any) -> Any:
        local = _batch_size(data)
        total = tf.distribute.get_replica_context().all_reduce("SUM", local)
        share = Share(strategy.extended._num_replicas_in_sync, local, total)
        with during(count=share, statistics=[]):
            result = fn(data)
            _average_statistics(step.statistics or [], share)
        return result

    return part


def _batch_size(data: Any) -> tf.Tensor:
    tensors = (x for x in tf.nest.flatten(data) if getattr(x, "shape", None) is not None)
    return tf.shape(next(tensors), out_type=tf.int64)[0]


# ---------------------------------------------------------------- optimizers


def _apply(strategy: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    original = functools.partial(type(optimizer).apply, optimizer)
    if step.reduced or not _on_a_replica():
        return original(grads, trainable_variables)
    grads = list(grads)
    variables = list(trainable_variables or optimizer._trainable_variables)
    _refuse_overwritten(variables)
    reducer: Reducer = strategy.reducer
    memory = Memory.of(optimizer, strategy)
    if not optimizer.built:
        with tf.init_scope():
            optimizer.build(variables)
    reducer.prepare(memory, optimizer, variables)
    reduce = functools.partial(reducer.reduce, optimizer=optimizer, memory=memory)
    inner = innermost(optimizer)
    curvature = inner.curvature(grads, variables) if hasattr(inner, "curvature") else []
    if inner.gradient_accumulation_steps:
        curvature = _summed_if_due(inner, curvature)
        if optimizer is not inner:
            grads = _finite_on_all_or_none(grads)
        waiting = [v for g, v in zip(grads, variables, strict=True) if g is not None]
        window = functools.partial(reduce, variables=waiting)
        with during(reduced=True, window=window), _given(optimizer, curvature):
            return original(grads, trainable_variables)
    if curvature and inner.update_each > 1:
        curvature = _summed_if_due(inner, curvature)
        grads = reduce(grads, variables=variables)
    else:
        sums = reduce(grads, variables=variables, curvature=curvature)
        grads, curvature = sums[: len(grads)], sums[len(grads) :]
    with during(reduced=True), _given(optimizer, curvature):
        return original(grads, trainable_variables)


def _summed_if_due(optimizer: Any, curvature: list[Any]) -> list[Any]:
    """What an optimizer has measured, summed over replicas in the steps in which it measures."""
    given = [i for i, d in enumerate(curvature) if d is not None]
    if not given:
        return curvature
    terms = [curvature[i] for i in given]

    def summed() -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", terms)

    sums = tf.cond(optimizer.curvature_is_due(), summed, lambda: terms)
    found = list(curvature)
    for i, total in zip(given, sums, strict=True):
        found[i] = total
    return found


def _given(optimizer: Any, curvature: list[Any]) -> Any:
    """A context in which the optimizer takes these for the curvature of the unscaled loss."""
    if not curvature:
        return contextlib.nullcontext()
    inner = innermost(optimizer)
    scale = inner.loss_scale_factor if inner is optimizer else optimizer.dynamic_scale
    if scale is not None:
        curvature = [None if d is None else d / tf.cast(scale, d.dtype) for d in curvature]
    return inner.given(curvature)


def _refuse_overwritten(variables: list[Any]) -> None:
    """What is no derivative must not be summed."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                f"{variable.path} takes its gradient as its value (an fp8 layer keeps its scales "
                "so), and several replicas have several. Train such layers on one device, or in "
                'another precision: keras.config.set_dtype_policy("mixed_bfloat16").'
            )


def _end_of_window(optimizer: Any, grads: Any) -> Any:
    """In place of ``_clip_gradients``, the first thing that happens to a window's sum."""
    if step.window is not None:
        grads = step.window(list(grads))
    return type(optimizer)._clip_gradients(optimizer, grads)


def _on_a_replica() -> bool:
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def _finite_on_all_or_none(grads: list[Any]) -> list[Any]:
    """Replicas that add up gradients on their own must skip the same steps."""
    finite = [
        tf.reduce_all(tf.math.is_finite(g.values if isinstance(g, tf.IndexedSlices) else g))
        for g in grads
        if g is not None
    ]
    overflow = tf.cast(tf.logical_not(tf.reduce_all(finite)), tf.float32)
    overflows = tf.distribute.get_replica_context().all_reduce("SUM", overflow)
    poison = tf.where(overflows > 0, float("nan"), 0.0)
    first = next(i for i, g in enumerate(grads) if g is not None)
    g = grads[first]
    if isinstance(g, tf.IndexedSlices):
        values = g.values + tf.cast(poison, g.dtype)
        poisoned = tf.IndexedSlices(values, g.indices, g.dense_shape)
    else:
        poisoned = g + tf.cast(poison, g.dtype)
    return [*grads[:first], poisoned, *grads[first + 1 :]]


# -------------------------------------------------------------------- losses


@contextlib.contextmanager
def _weighted_losses(strategy: Any, model: keras.Model) -> Iterator[None]:
    losses = getattr(model, "_compile_loss", None)
    if losses is None or not losses.built:
        yield
        return
    attributes, tracker = vars(losses), vars(model._loss_tracker)
    original = attributes["_flat_losses"]
    attributes["_flat_losses"] = [one._replace(loss=_Weighted(one.loss)) for one in original]
    # Keras logs each output's loss as a mean over replicas that counts all alike.
    attributes["call"] = functools.partial(_with_plain_count, type(losses).call, losses)
    tracker["update_state"] = functools.partial(_log_loss, model._loss_tracker)
    try:
        yield
    finally:
        attributes["_flat_losses"] = original
        del attributes["call"], tracker["update_state"]


def _log_loss(tracker: Any, loss: Any, sample_weight: Any = None) -> Any:
    """Keras multiplies what it logs by the number of replicas: right for a mean alone.

    The losses of single samples (``reduction="none"``) were not divided by it before.
    """
    share = step.count
    if isinstance(share, Share) and loss.shape.rank:
        loss = loss * share.part(loss.dtype)
    return type(tracker).update_state(tracker, loss, sample_weight=sample_weight)


def _with_plain_count(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with during(count=None, outer_count=step.count):
        return call(*args, **kwargs)


class _Weighted:
    """A loss that is scaled by the replica's part of what the loss divides by."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        share = self._share(y_pred, sample_weight)
        with during(count=share, counted=False):
            loss = self._loss(y_true, y_pred, sample_weight)
            scaled = step.counted
        if scaled or not isinstance(share, Share) or self._adds_up():
            return loss
        inexact.warn_of_a_number(self._loss)
        return loss * share.part(loss.dtype)

    def _adds_up(self) -> bool:
        return getattr(self._loss, "reduction", None) in ("sum", "none", None)

    def _share(self, y_pred: Any, sample_weight: Any) -> Any:
        held = self._held(getattr(y_pred, "_keras_mask", None), sample_weight)
        if held is None or step.outer_count is None:
            return step.outer_count
        total = tf.distribute.get_replica_context().all_reduce("SUM", held)
        return Share(int(step.outer_count), held, total)

    def _held(self, mask: Any, sample_weight: Any) -> Any:
        """What this replica holds of the divisor, if that is not its samples."""
        weighted = getattr(self._loss, "reduction", None) == "mean_with_sample_weight"
        if not weighted or sample_weight is None:
            return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))
        weights = tf.cast(sample_weight, tf.float32)
        if mask is not None:
            mask = tf.cast(mask, tf.float32)
            if weights.shape.rank == mask.shape.rank + 1:
                weights = tf.squeeze(weights, -1)
            weights = weights * mask
        return tf.reduce_sum(weights)


# ---------------------------------------------------------------- statistics


@contextlib.contextmanager
def _synchronized_batch_norm(model: keras.Model) -> Iterator[None]:
    layers = [
        layer
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
    ]
    for layer in layers:
        vars(layer)["synchronized"] = True
    try:
        yield
    finally:
        for layer in layers:
            vars(layer)["synchronized"] = False


def _average_statistics(variables: list[Any], share: Share) -> None:
    """Means weighted by shares, in float64: where all agree nothing changes, to the bit."""
    distinct = list({id(v): v for v in variables}.values())
    if not distinct:
        return
    own = [v._get_on_device_or_primary() for v in distinct]
    parts = [
        tf.math.multiply_no_nan(tf.cast(v.read_value(), tf.float64), share.part(tf.float64))
        for v in own
    ]
    means = tf.distribute.get_replica_context().all_reduce("SUM", parts)
    for variable, mean in zip(own, means, strict=True):
        variable.assign(tf.cast(mean, variable.dtype))
