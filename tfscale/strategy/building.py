"""Models and optimizers as they are made, compiled and built: whose they are, and what they get."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from tfscale.bridge import fit, hooks
from tfscale.bridge.calls import called_by
from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.objects import (
    give_strategy,
    layers_of,
    make_anew,
    metrics_of,
    optimizers_of,
)
from tfscale.bridge.protocols import Optimizer
from tfscale.exchange.state import ExchangeState
from tfscale.strategy import origin
from tfscale.strategy.current import on_a_replica

if TYPE_CHECKING:
    from tfscale.strategy.strategy import ScaleStrategy


def prepare_to_build(strategy: ScaleStrategy) -> None:
    """Let Keras try to build a model before its first step, and go on where it cannot.

    With a strategy, Keras calls a model on symbols to build it, outside of all replicas. One that
    has no ``call``, whose steps call it otherwise, or that talks to other replicas can't be built
    so; as without a strategy, its layers are then built while its step is traced.
    """
    if fit.wants_only_shapes():
        model = fit.fitted()
        refuse_foreign(strategy, model)
        build = functools.partial(_build_if_possible, strategy)
        hooks.SYMBOLIC_BUILD.put(model, build)


def _build_if_possible(
    strategy: ScaleStrategy, build: Callable[..., None], model: keras.Model, data_batch: Any
) -> None:
    """Called by Keras in the strategy's scope."""
    hooks.SYMBOLIC_BUILD.off(model)
    _adopt_metrics(strategy, model)
    if type(model).call is keras.Model.call:
        return
    own = any(getattr(type(model), own) is not getattr(keras.Model, own) for own in fit.STEPS)
    # Which metric "accuracy" is depends on what the step makes of the targets.
    no_metrics = hooks.NO_METRICS.showing(model, None) if own else contextlib.nullcontext()
    no_optimizer = hooks.NO_OPTIMIZER.showing(model, None)
    # The step will say what is wrong.
    with contextlib.suppress(Exception), no_metrics, no_optimizer:
        build(model, data_batch=data_batch)
    _build_optimizer(model)


def _build_optimizer(model: keras.Model) -> None:
    """Build it, unless the step is to build some layers first: it must know their variables."""
    optimizer = model.optimizer
    if optimizer is None or optimizer.built or not all(layer.built for layer in layers_of(model)):
        return
    with contextlib.suppress(Exception):  # the step will say what is wrong
        optimizer.build(model.trainable_variables)


def _adopt_metrics(strategy: ScaleStrategy, model: keras.Model) -> None:
    """Give metrics that were made outside of the scope a count on each replica.

    Their state is empty: Keras resets it before the first step.
    """
    for metric in metrics_of(model):
        for variable in origin.foreign(strategy, metric.variables):
            make_anew(variable)


def take_over(strategy: ScaleStrategy, model: keras.Model) -> None:
    """A model is being compiled in the scope; it may have been made before, if it is not built."""
    refuse_foreign(strategy, model)
    give_strategy(model, strategy)


def refuse_foreign(strategy: ScaleStrategy, model: keras.Model) -> None:
    """Refuse a model of which a part was made outside of the strategy's scope."""
    origin.refuse(strategy, f"the model {model.name!r}", model.variables)
    for optimizer in optimizers_of(model):
        origin.refuse(strategy, f"the optimizer {optimizer.name!r}", optimizer.variables)


def remember(strategy: ScaleStrategy, optimizer: Optimizer) -> None:
    """Give an optimizer its state when it is built: a file may be loaded into it from then on."""
    if KERAS_2:
        ExchangeState.of(optimizer, strategy)
    else:
        hooks.OPTIMIZER_BUILD.put(optimizer, functools.partial(_build_with_state, strategy))


def _build_with_state(
    strategy: ScaleStrategy, build: Callable[..., None], optimizer: Optimizer, variables: Any
) -> None:
    several = strategy.extended.number_of_replicas > 1
    if several and called_by("apply", levels=2) and not on_a_replica():
        raise RuntimeError(
            f"the optimizer {optimizer.name!r} was made in the scope of a ScaleStrategy, and is to "
            f"apply gradients that no replica has computed. {origin.BY_REPLICAS}"
        )
    hooks.OPTIMIZER_BUILD.off(optimizer)
    build(optimizer, variables)
    state = ExchangeState.of(optimizer, strategy)
    if strategy.rounds is not None:
        strategy.rounds.built(optimizer, state)


def watch_seeds(strategy: ScaleStrategy) -> None:
    """The seeds of a model that is about to train are saved with its optimizer.

    Layers of Keras 2 keep their seeds to themselves.
    """
    model = None if KERAS_2 else fit.fitted()
    if model is not None:
        for optimizer in optimizers_of(model):
            ExchangeState.of(optimizer, strategy).watch(model)
