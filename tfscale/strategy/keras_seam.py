"""Where the strategy meets Keras: makes ``fit`` on k replicas equal to ``fit`` on one device.

Keras passes every step to ``Strategy.run``. While a step is traced (or runs, eagerly)
some objects of the model get attributes that hide their methods; afterwards these
attributes are removed. No class and no module is changed, and no attribute is saved.
The strategy changes three things:

- An optimizer's ``apply`` gets gradients that have been summed over all replicas, so
  that clipping, decay and loss scaling see what they see on one device. Gradients that
  accumulate are summed once, at the end of their window.
- Losses are weighted by the replica's share of the global batch: of its samples, its
  unmasked steps or its sample weights. See keras_losses.py.
- Statistics of layers are averaged; batch normalization normalizes by the global batch.

A model is whatever fits: a ``keras.Model``, or a layer that its user has mixed with a ``Trainer``.

Keras's private names stand in this file, in keras_losses.py and in ``tfscale/backup.py`` alone;
``tests/strategy/test_private.py`` guards them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.trainers.trainer import Trainer

from tfscale.keras_objects import innermost
from tfscale.strategy import inexact, keras_losses, origin, own_losses
from tfscale.strategy.frames import called_by, caller, frames
from tfscale.strategy.gradients import Reducer, whole
from tfscale.strategy.memory import Memory
from tfscale.strategy.private import split_by_replica
from tfscale.strategy.rows import shared_out
from tfscale.strategy.shadow import shadowed
from tfscale.strategy.share import Share
from tfscale.strategy.step import during, step

OPTIMIZERS = keras.optimizers.Optimizer

TRAINING = "train_step"
STEPS = (TRAINING, "test_step")


def model_of(fn: Callable[..., Any]) -> Any:
    """The model whose step this is, or None."""
    owner = getattr(fn, "__self__", None)
    return owner if isinstance(owner, Trainer) and fn.__name__ in STEPS else None


def fit_that_begins() -> tuple[keras.Model, list[Any], dict[str, Any]] | None:
    """The ``fit`` that enters the strategy's scope: its model, callbacks and length; or None.

    Each ``fit`` enters it once, to build its model, before it calls its callbacks.
    """
    near = list(itertools.islice(frames(sys._getframe(1)), 4))
    for builds, fit in itertools.pairwise(near):
        if (builds.f_code.co_name, fit.f_code.co_name) == (_BUILDS, "fit"):
            told = fit.f_locals
            return told["self"], _listed(told["callbacks"]), _length(told)
    return None


def _length(fit: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of steps and epochs that workers must share; None if not known yet."""
    iterator, validates = fit["epoch_iterator"], fit["validation_data"] is not None
    found = {"number of epochs": fit["epochs"]}
    found |= {name: fit[name] for name in ("initial_epoch", "batch_size")}
    found["number of steps in an epoch"] = iterator.steps_per_epoch or iterator._num_batches
    found["validation_data"] = "none" if not validates else "some"
    if validates:
        found["validation_freq"] = fit["validation_freq"]
        size = fit["validation_batch_size"] or fit["batch_size"] or 32
        found["number of steps in a validation"] = fit["validation_steps"] or _batches(
            fit["val_x"], size
        )
    return found


def _batches(x: Any, size: int) -> int | None:
    """How many batches there are, if that can be told without reading any."""
    if isinstance(x, tf.data.Dataset):
        return known if (known := int(x.cardinality())) >= 0 else None
    if hasattr(x, "num_batches"):  # keras.utils.PyDataset
        return x.num_batches  # type: ignore[no-any-return]
    shape = getattr(tf.nest.flatten(x)[0], "shape", None)
    return math.ceil(shape[0] / size) if shape and shape[0] is not None else None


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
    return called_by(_BUILDS)


def predicts() -> bool:
    """Whether Keras wants predictions, which it joins."""
    return called_by("one_step_on_data_distributed")


def prepare_to_build(strategy: Any) -> None:
    """Let Keras try to build a model before its first step, and go on where it cannot.

    With a strategy, Keras calls a model on symbols to build it. One that has no ``call``, or whose
    steps call it otherwise, can't be built so; as without a strategy, its layers are then built
    while its step is traced.
    """
    if called_by(_BUILDS):
        model = caller(Trainer)
        refuse_foreign(strategy, model)
        vars(model)[_BUILD] = functools.partial(_build_if_possible, model)


_BUILDS = "_maybe_symbolic_build"
_BUILD = "_symbolic_build"


def _build_if_possible(model: keras.Model, **batch: Any) -> None:
    del vars(model)[_BUILD]
    if type(model).call is keras.Model.call:
        return
    own = any(getattr(type(model), own) is not getattr(keras.Model, own) for own in STEPS)
    # Which metric "accuracy" is depends on what the step makes of the targets.
    metrics = shadowed(model, "_compile_metrics", None) if own else contextlib.nullcontext()
    try:
        with metrics:
            getattr(model, _BUILD)(**batch)
    except Exception:
        if not own:
            raise


def compiling() -> keras.Model | None:
    """The model that is being compiled, or None."""
    for frame in frames(sys._getframe(1)):
        model = frame.f_locals.get("self")
        if frame.f_code.co_name == "compile" and isinstance(model, Trainer):
            return model
    return None


def take_over(strategy: Any, model: keras.Model) -> None:
    """A model is being compiled in the scope; it may have been made before, if it is not built."""
    refuse_foreign(strategy, model)
    if model._distribute_strategy is None:
        model._distribute_strategy = strategy


def refuse_foreign(strategy: Any, model: keras.Model) -> None:
    """Refuse a model of which a part was made outside of the strategy's scope."""
    origin.refuse(strategy, f"the model {model.name!r}", model.variables)
    for optimizer in optimizers_of(model):
        origin.refuse(strategy, f"the optimizer {optimizer.name!r}", optimizer.variables)


def _refuse_foreign_metrics(strategy: Any, model: keras.Model) -> None:
    """Needed only with several workers: each would count by itself."""
    if strategy.extended._num_workers > 1:
        for metric in model.metrics:
            origin.refuse(strategy, f"the metric {metric.name!r}", metric.variables)


def for_shapes(
    dataset: Any, distributed: Any, distribute: Callable[[Any], Any]
) -> Callable[[], Any] | None:
    """Gives what Keras may read for its batches' shapes; None if it will read none for these.

    Keras reads a batch for its shapes and then starts to read from the beginning. For that it
    keeps the batch that it took from a generator, but not batches that were read ahead.
    """
    iterator = caller(EpochIterator)
    if iterator is None:
        return None
    if isinstance(iterator.data_adapter, GeneratorDataAdapter):
        one_batch = dataset._input_dataset.take(1)  # what is behind it reads ahead
        return functools.partial(distribute, one_batch)
    return functools.partial(_shapes_alone, distributed)


def _shapes_alone(distributed: Any) -> Any:
    """The shapes of a replica's batches where they are known, and no batch.

    One device reads no batch for that. Reading one would be seen: a shuffle gives another order
    each time, and threads that read ahead for a PyDataset would take from what comes next.
    """
    batch = tf.nest.map_structure(lambda one: split_by_replica(one, i=0), distributed.element_spec)
    specs = tf.nest.flatten(batch)
    eager = caller(Trainer).run_eagerly  # there one device sees numbers, never an unknown size
    return distributed if eager or any(spec.shape.rank is None for spec in specs) else [batch]


def remember(strategy: Any, optimizer: Any) -> None:
    """Give an optimizer its memory when it is built: a file may be loaded into it from then on."""
    vars(optimizer)["build"] = functools.partial(_build_with_memory, strategy, optimizer)


def _build_with_memory(strategy: Any, optimizer: Any, variables: Any) -> None:
    del vars(optimizer)["build"]
    optimizer.build(variables)
    Memory.of(optimizer, strategy)


def watch_seeds(strategy: Any) -> None:
    """The seeds of a model that is about to train are saved with its optimizer."""
    model = caller(Trainer)
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
    """Within this context these optimizers apply sums over all replicas."""
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
    """Within this context a step of the model is a part of the global batch's step."""
    layers = layers_of(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras_losses.weighted(model, layers))
        if training:
            refuse_foreign(strategy, model)
            _refuse_foreign_metrics(strategy, model)
            inexact.warn(strategy, layers)
            strategy.reducer.check_rules(model.trainable_variables)
            stack.enter_context(hooked(strategy, {*optimizers_of(model), *strategy.optimizers}))
        if training and strategy.synchronizes_batch_norm:
            for layer in layers:
                if isinstance(layer, keras.layers.BatchNormalization):
                    moments = functools.partial(_moments, layer)
                    stack.enter_context(shadowed(layer, "_moments", moments))
        yield


def step_of_replica(strategy: Any, model: keras.Model, fn: Callable[..., Any]) -> Any:
    """A model's step, which knows what part of the global batch it is."""
    replicas = strategy.extended._num_replicas_in_sync
    own = getattr(type(model), fn.__name__) is not getattr(keras.Model, fn.__name__)

    @tf.autograph.experimental.do_not_convert
    def part(data: Any) -> Any:
        rows, data = shared_out(data, replicas)
        share = Share(replicas, rows.local, rows.total)
        known = {"reads": 0, "seen": {}, "noted": 0, "scaled": set(), "results": {}}
        known |= {"batch": data, "origins": {}}
        with during(model=model, own=own, rows=rows, count=share, statistics=[], **known):
            result = fn(data)
            _average_statistics(step.statistics or [], share)
            if own:
                result = own_losses.logged(*keras_losses.with_results_of_all(result))
            return tf.nest.map_structure(_read, result)

    return part


def _read(result: Any) -> Any:
    """A metric's result may be its variable; the replica reads it where it is."""
    variable = isinstance(result, (keras.Variable, tf.Variable))
    return tf.convert_to_tensor(result) if variable else result


def prediction_of_replica(strategy: Any, fn: Callable[..., Any]) -> Any:
    """What a model says of its part of a batch."""
    replicas = strategy.extended._num_replicas_in_sync

    @tf.autograph.experimental.do_not_convert
    def part(data: Any) -> Any:
        rows, data = shared_out(data, replicas)
        return tf.nest.map_structure(rows.kept, fn(data))

    return part


# ---------------------------------------------------------------- optimizers


def _apply(strategy: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    original = functools.partial(type(optimizer).apply, optimizer)
    if step.reduced or not _on_a_replica():
        return original(grads, trainable_variables)
    grads = own_losses.scaled_gradients(list(grads)) if step.own else list(grads)
    variables = list(trainable_variables or optimizer._trainable_variables)
    origin.refuse(strategy, f"what {optimizer.name!r} is to update", variables)
    _refuse_overwritten(variables)
    reducer: Reducer = strategy.reducer
    memory = Memory.of(optimizer, strategy)
    if not optimizer.built:
        with tf.init_scope():
            optimizer.build(variables)
    reduce = functools.partial(reducer.reduce, optimizer=optimizer, memory=memory)
    inner = innermost(optimizer)
    windows = bool(inner.gradient_accumulation_steps)  # what is accumulated is whole
    reducer.prepare(memory, optimizer, whole(grads, variables, windows))
    curvature = inner.curvature(grads, variables) if hasattr(inner, "curvature") else []
    if windows:
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
    """Refuse variables whose "gradient" is a new value: such values must not be summed."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                f"{variable.path} takes its gradient as its value (fp8 layers update their scales "
                "in this way), and each replica has another value. Train such layers on one device "
                'or in another precision: keras.config.set_dtype_policy("mixed_bfloat16").'
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
    if not finite:
        return grads
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


# ---------------------------------------------------------------- statistics


def _moments(layer: Any, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of the global batch, as batch normalization takes them of its own inputs.

    In two passes, since the mean of squares minus the square of the mean loses the more digits
    the larger the mean is beside the deviation. That takes two exchanges; Keras makes three.
    """
    context, axes = tf.distribute.get_replica_context(), layer._reduction_axes
    if mask is None:
        held, count = (
            inputs,
            tf.cast(tf.reduce_prod(tf.gather(tf.shape(inputs), axes)), inputs.dtype),
        )
    else:
        mask = tf.broadcast_to(mask[..., tf.newaxis], tf.shape(inputs))
        held, count = _where(mask, inputs), tf.reduce_sum(tf.cast(mask, inputs.dtype), axes)
    total, count = context.all_reduce("SUM", [tf.reduce_sum(held, axes), count])
    if mask is not None:
        count += keras.backend.epsilon()  # as Keras does
    mean = tf.math.divide_no_nan(total, count)
    channels = [-1 if i not in axes else 1 for i in range(inputs.shape.rank)]
    squares = _where(mask, tf.square(inputs - tf.reshape(mean, channels)))
    variance = context.all_reduce("SUM", tf.reduce_sum(squares, axes))
    return mean, tf.math.divide_no_nan(variance, count)


def _where(mask: tf.Tensor | None, values: tf.Tensor) -> tf.Tensor:
    return values if mask is None else tf.where(tf.cast(mask, tf.bool), values, 0)


def _average_statistics(variables: list[Any], share: Share) -> None:
    """Means weighted by shares, in float64: if all agree, the mean is that value, to the bit."""
    distinct = list({id(v): v for v in variables}.values())
    if not distinct:
        return
    own = [v._get_on_device_or_primary() for v in distinct]
    parts = [
        tf.math.multiply_no_nan(tf.cast(v.read_value(), tf.float64), share.weight(tf.float64))
        for v in own
    ]
    means = tf.distribute.get_replica_context().all_reduce("SUM", parts)
    for variable, mean in zip(own, means, strict=True):
        variable.assign(tf.cast(mean, variable.dtype))
