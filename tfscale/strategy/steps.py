"""Hooks that make ``fit`` on k replicas equal to ``fit`` on one device, with Keras 3.

Keras passes every step to ``Strategy.run``. While a step is traced, or runs eagerly, hooks are on
some objects of the model and on a few classes of Keras: see ``bridge/hooks.py``. No hook is saved
with a model. The strategy changes three things:

- An optimizer's ``apply`` gets gradients that have been summed over all replicas: applying.py.
- Losses are weighted by the replica's share of the samples, the unmasked steps or the sample
  weights of the global batch: keras_losses.py, own_losses.py.
- Statistics of layers are averaged, and batch normalization normalizes by the global batch:
  statistics.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfscale.bridge.fit import ModelStep, fitted
from tfscale.bridge.functions import inlined
from tfscale.bridge.hooks import MOMENTS
from tfscale.bridge.losses import reducing
from tfscale.bridge.objects import layers_of, optimizers_of
from tfscale.bridge.tapes import targets_changed
from tfscale.strategy import inexact, keras_losses, mates, own_losses, statistics
from tfscale.strategy.applying import hooked
from tfscale.strategy.building import refuse_foreign
from tfscale.strategy.current import during
from tfscale.strategy.rows import is_batch, shared_out
from tfscale.strategy.share import Share

if TYPE_CHECKING:
    from tfscale.strategy.model_rounds import ModelRounds
    from tfscale.strategy.strategy import ScaleStrategy


@contextlib.contextmanager
def exact(strategy: ScaleStrategy, model: keras.Model, training: bool) -> Iterator[None]:
    """Make a step of the model a part of the global batch's step, within this context."""
    layers = layers_of(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras_losses.weighted(model, layers))
        if training:
            refuse_foreign(strategy, model)
            inexact.warn(strategy, layers)
            for reducer in strategy.reducers:
                reducer.check_rules(model.trainable_variables)
            stack.enter_context(hooked(strategy, {*optimizers_of(model), *strategy.optimizers}))
        if training and strategy.synchronizes_batch_norm:
            for layer in layers:
                if isinstance(layer, keras.layers.BatchNormalization):
                    stack.enter_context(MOMENTS.on(layer, statistics.moments))
        yield


def step_of_replica(strategy: ScaleStrategy, step: ModelStep, fn: Callable[..., Any]) -> Any:
    """Return a model's step that knows its replica's share of the global batch."""
    replicas, model, own = strategy.extended.number_of_replicas, step.model, step.is_own
    rounds = strategy.rounds if step.changes_weights else None
    own_rounds = None if rounds is None else rounds.of(model)
    spare = None if own_rounds is None else own_rounds.spare_row

    @tf.autograph.experimental.do_not_convert
    def part(data: Any) -> Any:
        rows, data = shared_out(data, replicas, spare)
        share = Share(replicas, rows.local, rows.total)
        known = {
            "reads": 0,
            "seen": {},
            "noted": 0,
            "scaled": set(),
            "results": {},
            "looked": False,
            "agreed": set(),
        }
        known |= {"batch": data, "batch_ops": _operations(data), "origins": {}}
        changed: list[Any] = []
        with during(model=model, own=own, rows=rows, count=share, statistics=changed, **known):
            with reducing(keras_losses.reduced), _targets_of(own), inlined():
                result = fn(data)
            statistics.average(changed, share)
            if step.makes_logs:
                result = own_losses.logged(*keras_losses.with_results_of_all(result))
            result = tf.nest.map_structure(_read, result)
        if own_rounds is not None:
            with _only_with(data):
                own_rounds.after_step(changed)
        return result

    if own_rounds is None:
        return _evaluating(strategy, model, part)
    return _in_a_round(own_rounds, part)


def _operations(data: Any) -> dict[tf.Operation, int]:
    """Return the operations that give the tensors of a batch, with the tensors' positions.

    The result is empty in eager steps.
    """
    if tf.executing_eagerly():
        return {}
    whole = [x for x in tf.nest.flatten(data) if is_batch(x)]
    return {
        tensor.op: place
        for place, one in enumerate(whole)
        for tensor in tf.nest.flatten(one, expand_composites=True)
        if tf.is_tensor(tensor)
    }


def _targets_of(own: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context that weights losses for the tapes of a step.

    It does nothing for Keras's own steps, whose losses are weighted already.
    """
    return targets_changed(own_losses.target_of_gradients) if own else contextlib.nullcontext()


def _in_a_round(rounds: ModelRounds, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step of training that replicas may make alone."""

    @tf.autograph.experimental.do_not_convert
    def made(data: Any) -> Any:
        with _only_with(data):
            alone = rounds.before_step()
        with during(alone=alone, group=rounds.team), mates.gathering(rounds.everybody):
            return step(data)

    return made  # type: ignore[no-any-return]


def _only_with(data: Any) -> Any:
    """Return a context whose operations run only if the step has data.

    Keras ends some epochs with a step without data.
    """
    tensors = tf.nest.flatten(data, expand_composites=True)
    return tf.control_dependencies([x for x in tensors if tf.is_tensor(x)])


def _evaluating(
    strategy: ScaleStrategy, model: keras.Model, step: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a step of an evaluation or a prediction that uses the same weights on all replicas."""
    rounds = strategy.rounds
    if rounds is None:
        return step

    @tf.autograph.experimental.do_not_convert
    def evaluated(data: Any) -> Any:
        rounds.before_evaluation(model)
        return step(data)

    return evaluated  # type: ignore[no-any-return]


def _read(result: Any) -> Any:
    """Return a result as a tensor: the result of a metric may be its variable."""
    variable = isinstance(result, (keras.Variable, tf.Variable))
    return tf.convert_to_tensor(result) if variable else result


def prediction_of_replica(strategy: ScaleStrategy, fn: Callable[..., Any]) -> Any:
    """Return a function that predicts on a replica's part of a batch."""
    replicas = strategy.extended.number_of_replicas

    @tf.autograph.experimental.do_not_convert
    def part(data: Any) -> Any:
        rows, data = shared_out(data, replicas)
        return tf.nest.map_structure(rows.kept, fn(data))

    model = fitted()
    return part if model is None else _evaluating(strategy, model, part)
