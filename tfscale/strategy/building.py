"""Models and optimizers as they are made, compiled and built: whose they are, and what they get."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import keras

from tfscale.bridge import fit
from tfscale.bridge.calls import called_by
from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.objects import optimizers_of
from tfscale.bridge.protocols import Optimizer
from tfscale.bridge.shadow import shadowed
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
        vars(model)[_BUILD] = functools.partial(_build_if_possible, model)


_BUILD = "_symbolic_build"


def _build_if_possible(model: keras.Model, **batch: Any) -> None:
    del vars(model)[_BUILD]
    if type(model).call is keras.Model.call:
        return
    own = any(getattr(type(model), own) is not getattr(keras.Model, own) for own in fit.STEPS)
    # Which metric "accuracy" is depends on what the step makes of the targets.
    metrics = shadowed(model, "_compile_metrics", None) if own else contextlib.nullcontext()
    with contextlib.suppress(Exception), metrics:  # what is wrong with a model, its step will say
        getattr(model, _BUILD)(**batch)


def take_over(strategy: ScaleStrategy, model: keras.Model) -> None:
    """A model is being compiled in the scope; it may have been made before, if it is not built."""
    refuse_foreign(strategy, model)
    if model._distribute_strategy is None:
        model._distribute_strategy = strategy


def refuse_foreign(strategy: ScaleStrategy, model: keras.Model) -> None:
    """Refuse a model of which a part was made outside of the strategy's scope."""
    origin.refuse(strategy, f"the model {model.name!r}", model.variables)
    for optimizer in optimizers_of(model):
        origin.refuse(strategy, f"the optimizer {optimizer.name!r}", optimizer.variables)


def refuse_foreign_metrics(strategy: ScaleStrategy, model: keras.Model) -> None:
    """Needed only with several workers: each would count by itself."""
    if strategy.extended._num_workers > 1:
        for metric in model.metrics:
            origin.refuse(strategy, f"the metric {metric.name!r}", metric.variables)


def remember(strategy: ScaleStrategy, optimizer: Optimizer) -> None:
    """Give an optimizer its state when it is built: a file may be loaded into it from then on."""
    if KERAS_2:
        ExchangeState.of(optimizer, strategy)
    else:
        vars(optimizer)["build"] = functools.partial(_build_with_state, strategy, optimizer)


def _build_with_state(strategy: ScaleStrategy, optimizer: Optimizer, variables: Any) -> None:
    several = strategy.extended._num_replicas_in_sync > 1
    if several and called_by("apply", levels=2) and not on_a_replica():
        raise RuntimeError(
            f"the optimizer {optimizer.name!r} was made in the scope of a ScaleStrategy, and is to "
            f"apply gradients that no replica has computed. {origin.BY_REPLICAS}"
        )
    del vars(optimizer)["build"]
    optimizer.build(variables)
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
