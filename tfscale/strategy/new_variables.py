"""The class of each new variable of a strategy, by what the variable is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfscale.bridge.layers import variable_being_made
from tfscale.bridge.objects import (
    ACCUMULATOR,
    LAYER_SEED,
    RNN_STATE,
    is_variable,
    key_of,
    kind_of_keras,
    path_of,
)
from tfscale.bridge.tensorflow import MirroredVariable, SyncOnReadVariable, variables_of
from tfscale.exchange.slots import COMMON, IN_SHARDS, ON_EACH, created_now
from tfscale.strategy.placed import Placed, Shard, placed_now
from tfscale.strategy.variables import (
    Accumulator,
    LocalStatistic,
    LocalWeight,
    Part,
    SampleState,
    Seed,
    Statistic,
    Tally,
    Weight,
)

_SUMMED = (
    'the variable {!r} has aggregation="sum", which sums each assignment over replicas, but in '
    "rounds replicas train alone. Leave out aggregation, and tfscale averages the variable at the "
    "end of each round; or use sync=tfscale.sync.EveryStep()"
)

# Classes of variables that tfscale makes as slots, by where the slot lives.
_OF_SLOTS: dict[str, type[Weight]] = {ON_EACH: Part, COMMON: Weight, IN_SHARDS: Shard}

_OF_KERAS: dict[str | None, type[Weight]] = {
    LAYER_SEED: Seed,
    RNN_STATE: SampleState,
    ACCUMULATOR: Accumulator,
}


def kind_of(keywords: Mapping[str, Any], dtype: tf.DType, in_rounds: bool) -> type[Weight]:
    """Return the class of a new variable.

    Args:
        keywords: arguments that the variable is made with.
        dtype: type of the variable.
        in_rounds: whether replicas train alone between the ends of rounds.
    """
    if (placement := placed_now()) is not None:
        return placement.kind or Placed
    if (lives := created_now()) is not None:
        return _OF_SLOTS[lives]
    name, trained = keywords.get("name") or "", keywords.get("trainable") is not False
    aggregation = keywords.get("aggregation") or tf.VariableAggregation.NONE
    alone = in_rounds and dtype.is_floating
    if aggregation == tf.VariableAggregation.NONE:
        of_keras = kind_of_keras(name, dtype, trained)
        if of_keras is not None:
            return _OF_KERAS[of_keras]
    elif alone and aggregation == tf.VariableAggregation.SUM:
        raise ValueError(_SUMMED.format(name))
    elif not alone or aggregation != tf.VariableAggregation.MEAN:
        return Weight
    if alone:
        return LocalWeight if trained else LocalStatistic
    return Weight if trained else Statistic


def made(create: Callable[[], Any], keywords: Mapping[str, Any], in_rounds: bool) -> Any:
    """Make a replicated variable of the class that fits its use.

    Args:
        create: function that makes the variable with TensorFlow.
        keywords: arguments that the variable is made with.
        in_rounds: whether replicas train alone between the ends of rounds.
    """

    def choose(kind: type, aggregation: Any, dtype: tf.DType) -> tuple[type, Any]:
        if kind is SyncOnReadVariable:
            return Tally, aggregation
        if kind is not MirroredVariable:
            return kind, aggregation
        ours = kind_of(keywords, dtype, in_rounds)
        if issubclass(ours, LocalWeight):  # the ends of rounds average it
            aggregation = tf.VariableAggregation.NONE
        return ours, aggregation

    with variables_of(choose):
        variable = create()
    weight: Any = keywords.get("colocate_with")
    if is_variable(weight) and isinstance(variable, Weight):
        variable.beside = key_of(weight)
    if (placement := placed_now()) is not None:
        variable.layout, variable.team = placement.layout, placement.team
        made = variable_being_made()
        variable.keras_path = path_of(variable if made is None else made)
        placement.first = None  # TensorFlow keeps the functions that make initial values
    if isinstance(variable, Seed):
        with tf.init_scope():
            for i, component in enumerate(variable.values):
                if component.is_initialized():  # a SavedModel sets seeds later
                    component.assign(variable.of_replica(i, component.read_value()))
    return variable
