"""Hooks for the moments when models and optimizers are made, compiled and built."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfscale.bridge import fit, hooks
from tfscale.bridge.calls import called_by
from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.models import overrides
from tfscale.bridge.objects import (
    give_strategy,
    layers_of,
    make_anew,
    metrics_of,
    optimizers_of,
)
from tfscale.bridge.protocols import Optimizer
from tfscale.bridge.stateless import forget_unmade_variables
from tfscale.exchange.slots import Slots
from tfscale.strategy import agreement, origin
from tfscale.strategy.grid.weights import CannotBeCut
from tfscale.strategy.protocols import Strategy
from tfscale.strategy.step import on_a_replica
from tfscale.strategy.workers import join
from tfscale.support.names import TIMELINE_VARIABLE


def prepare_to_build(strategy: Strategy) -> None:
    """Let Keras try to build a model before its first step, and continue if that fails.

    With a strategy, Keras builds a model by calling it on symbolic inputs, outside of all replicas.
    This fails for a model that has no ``call``, that is called differently in its steps, or that
    communicates with other replicas. The layers of such a model are built while its step is traced,
    as without a strategy.
    """
    if fit.wants_only_shapes():
        model = fit.fitted()
        refuse_foreign(strategy, model)
        build = functools.partial(_build_if_possible, strategy)
        hooks.SYMBOLIC_BUILD.put(model, build)


def begin_fit(
    strategy: Strategy, model: keras.Model, callbacks: Sequence[Any], length: Mapping[str, Any]
) -> None:
    """Compare the model and the length of a ``fit`` that begins with those of other workers."""
    join.same_model(strategy.extended.hosts, model)
    join.same_length(strategy.extended.hosts, length)
    has_telemetry = _has_telemetry(callbacks)
    strategy.meets = join.have_all(strategy.extended.hosts, "telemetry of workers", has_telemetry)
    if strategy.extended.worker == 0 and not has_telemetry:
        _say_if_no_timeline()
    if strategy.rounds is not None:
        strategy.rounds.begins(model, callbacks, length)
    agreement.check_at_the_end(strategy, model)


def _has_telemetry(callbacks: Sequence[Any]) -> bool:
    # A program that has made a Telemetry has imported its module; others need not.
    telemetry = sys.modules.get("tfscale.callbacks.telemetry")
    return telemetry is not None and any(
        isinstance(each, telemetry.Telemetry) for each in callbacks
    )


def _say_if_no_timeline() -> None:
    """Warn if a timeline is requested, which no callback records.

    The launcher could only report this at the end, perhaps after days.
    """
    if not os.environ.get(TIMELINE_VARIABLE):
        return
    logging.getLogger("tfscale").warning(
        "tfscale launch --timeline asks for a timeline, and this fit records none: give it the "
        "callback tfscale.callbacks.Telemetry(), which records steps 10 to 12"
    )


def _build_if_possible(
    strategy: Strategy, build: Callable[..., None], model: keras.Model, data_batch: Any
) -> None:
    """Build a model if that is possible; Keras calls this in the strategy's scope."""
    hooks.SYMBOLIC_BUILD.off(model)
    _adopt_metrics(strategy, model)
    if type(model).call is keras.Model.call:
        return
    own = any(overrides(model, name) for name in fit.STEPS)
    # Keras chooses the metric for "accuracy" by the targets, which a step of the user may change.
    no_metrics = hooks.NO_METRICS.showing(model, None) if own else contextlib.nullcontext()
    no_optimizer = hooks.NO_OPTIMIZER.showing(model, None)
    with no_metrics, no_optimizer:
        try:
            build(model, data_batch=data_batch)
        except CannotBeCut:
            forget_unmade_variables()
            raise
        except Exception:  # the step raises a clearer error later
            pass
    strategy.parts.take(model)
    _build_optimizer(model)


def _build_optimizer(model: keras.Model) -> None:
    """Build the optimizer if all layers are built: the optimizer must know all variables."""
    optimizer = model.optimizer
    if optimizer is None or optimizer.built or not all(layer.built for layer in layers_of(model)):
        return
    with contextlib.suppress(Exception):  # the step raises a clearer error later
        optimizer.build(model.trainable_variables)


def _adopt_metrics(strategy: Strategy, model: keras.Model) -> None:
    """Make the variables of metrics again, in the scope, if they were made outside of the scope.

    No counts are lost: Keras resets metrics before the first step.
    """
    for metric in metrics_of(model):
        for variable in origin.foreign(strategy, metric.variables):
            make_anew(variable)


def take_over(strategy: Strategy, model: keras.Model) -> None:
    """Give the strategy a model that is being compiled in its scope.

    A model that is not built yet may have been made outside of the scope.
    """
    refuse_foreign(strategy, model)
    give_strategy(model, strategy)
    strategy.parts.take(model)


def refuse_foreign(strategy: Strategy, model: keras.Model) -> None:
    """Raise if a part of the model was made outside of the strategy's scope."""
    origin.refuse(strategy, f"the model {model.name!r}", model.variables)
    for optimizer in optimizers_of(model):
        origin.refuse(strategy, f"the optimizer {optimizer.name!r}", optimizer.variables)


def remember(strategy: Strategy, optimizer: Optimizer) -> None:
    """Give an optimizer its exchange state when it is built, before a file is loaded into it."""
    if KERAS_2:
        Slots.of(optimizer, strategy)
    else:
        hooks.OPTIMIZER_BUILD.put(optimizer, functools.partial(_build_with_state, strategy))


def _build_with_state(
    strategy: Strategy, build: Callable[..., None], optimizer: Optimizer, variables: Any
) -> None:
    several = strategy.extended.number_of_replicas > 1
    if several and called_by("apply", levels=2) and not on_a_replica():
        raise RuntimeError(
            f"the optimizer {optimizer.name!r} was made in the scope of a ScaleStrategy, but its "
            "apply was called outside of strategy.run, with gradients that no replica has "
            f"computed. {origin.BY_REPLICAS}"
        )
    hooks.OPTIMIZER_BUILD.off(optimizer)
    if strategy.sharding is None:
        build(optimizer, variables)
    else:
        strategy.sharding.build(build, optimizer, variables, strategy.parts)
    state = Slots.of(optimizer, strategy)
    if strategy.rounds is not None:
        strategy.rounds.built(optimizer, state)


def watch_seeds(strategy: Strategy) -> None:
    """Save the seeds of a model that is about to train with its optimizer, and measured shares.

    This does nothing with Keras 2, whose layers do not expose their seeds.
    """
    model = None if KERAS_2 else fit.fitted()
    if model is not None:
        for optimizer in optimizers_of(model):
            slots = Slots.of(optimizer, strategy)
            slots.watch(model)
            if strategy.balance is not None:
                strategy.balance.keep_in(slots)
