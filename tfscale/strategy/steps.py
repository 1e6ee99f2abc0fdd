"""Makes ``fit`` on k replicas equal to ``fit`` on one device, with Keras 3.

Keras passes every step to ``Strategy.run``. While a step is traced (or runs, eagerly)
some objects of the model get attributes that hide their methods; afterwards these
attributes are removed. No class and no module is changed, and no attribute is saved.
The strategy changes three things:

- An optimizer's ``apply`` gets gradients that have been summed over all replicas: applying.py.
- Losses are weighted by the replica's share of the global batch, of its samples, its unmasked
  steps or its sample weights: keras_losses.py, own_losses.py.
- Statistics of layers are averaged, and batch normalization normalizes by the global batch:
  statistics.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfscale.bridge.objects import layers_of, optimizers_of
from tfscale.bridge.shadow import shadowed
from tfscale.strategy import inexact, keras_losses, own_losses, statistics
from tfscale.strategy.applying import hooked
from tfscale.strategy.building import refuse_foreign, refuse_foreign_metrics
from tfscale.strategy.current import current, during
from tfscale.strategy.rows import shared_out
from tfscale.strategy.share import Share

if TYPE_CHECKING:
    from tfscale.strategy.strategy import ScaleStrategy


@contextlib.contextmanager
def exact(strategy: ScaleStrategy, model: keras.Model, training: bool) -> Iterator[None]:
    """Within this context a step of the model is a part of the global batch's step."""
    layers = layers_of(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras_losses.weighted(model, layers))
        if training:
            refuse_foreign(strategy, model)
            refuse_foreign_metrics(strategy, model)
            inexact.warn(strategy, layers)
            strategy.reducer.check_rules(model.trainable_variables)
            stack.enter_context(hooked(strategy, {*optimizers_of(model), *strategy.optimizers}))
        if training and strategy.synchronizes_batch_norm:
            for layer in layers:
                if isinstance(layer, keras.layers.BatchNormalization):
                    moments = functools.partial(statistics.moments, layer)
                    stack.enter_context(shadowed(layer, "_moments", moments))
        yield


def step_of_replica(strategy: ScaleStrategy, model: keras.Model, fn: Callable[..., Any]) -> Any:
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
            statistics.average(current.statistics or [], share)
            if own:
                result = own_losses.logged(*keras_losses.with_results_of_all(result))
            return tf.nest.map_structure(_read, result)

    return part


def _read(result: Any) -> Any:
    """A metric's result may be its variable; the replica reads it where it is."""
    variable = isinstance(result, (keras.Variable, tf.Variable))
    return tf.convert_to_tensor(result) if variable else result


def prediction_of_replica(strategy: ScaleStrategy, fn: Callable[..., Any]) -> Any:
    """What a model says of its part of a batch."""
    replicas = strategy.extended._num_replicas_in_sync

    @tf.autograph.experimental.do_not_convert
    def part(data: Any) -> Any:
        rows, data = shared_out(data, replicas)
        return tf.nest.map_structure(rows.kept, fn(data))

    return part
