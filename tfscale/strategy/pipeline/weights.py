"""Weights of a pipeline: each replica holds those of its stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.objects import make_anew, native
from tfscale.bridge.tensorflow import become
from tfscale.parallel.grid import Grid
from tfscale.parallel.layout import Owned, Repeated
from tfscale.strategy.grid.weights import SplitWeight
from tfscale.strategy.pipeline.stages import Stages
from tfscale.strategy.placed import OwnedCopy, Placed, Placement, assign_part, placing
from tfscale.strategy.step import on_a_replica, this_step
from tfscale.strategy.variables import Seed, Statistic, Weight

_SHARED_STATE = (
    "the layer that has {path} is called in stages {stages}, and each stage would compute this "
    "state from rows of its own. Call the layer in one stage, or choose other cuts"
)

_STATE_ON_TWO_RANKS = (
    "the order puts the layer that has {path} on the ranks {ranks}, and each of them would compute "
    "this state from microbatches of its own. Take an order with each stage on one rank, such as "
    '"1f1b" or "zero_bubble", or leave out batch normalization, dropout and other layers with a '
    "state"
)
_NOT_IN_A_TURN = (
    "{path} is a weight of one stage of a pipeline, and a step that was passed to strategy.run "
    "reads it on all replicas, of which others hold nothing of it. Only Keras's own steps take "
    "microbatches in turns: train with fit or train_on_batch, or leave pipeline out"
)


class _OfStage(Placed):
    """Weight of one stage, which only the turns of its stage read."""

    def _get(self) -> Any:
        if on_a_replica() and this_step().model is None:
            raise ValueError(_NOT_IN_A_TURN.format(path=self.keras_path))
        return super()._get()


class StageWeight(_OfStage):
    """Weight of one stage: the replicas of the stage hold it, and those of others hold nothing."""

    layout: Repeated


class StageSlice(_OfStage, SplitWeight):
    """Weight of one stage of which each replica of the stage holds a slice."""


class StageState(OwnedCopy):
    """State that one stage computes, such as a moving mean: that stage's value is read."""

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        step = this_step()
        assigned = None if step.is_reduced or not self.dtype.is_floating else step.assigned
        if assigned is not None and not Statistic.is_agreed(self, value):
            assigned.differ_by_replica.append(self)
        return super()._update_replica(update_fn, value, **kwargs)


class StageSeed(Seed):
    """State of a random generator of one stage."""

    layout: Repeated

    def _get_cross_replica(self) -> tf.Tensor:
        extended = self.distribute_strategy.extended
        common = [v.read_value() - self._fold(i) for i, v in enumerate(self.values)]
        return extended.whole(self.layout, common, f"the seed {self._common_name}")


class UndrawnSeed(Seed):
    """State of a random generator that several ranks have: each holds a copy, and none may draw.

    Recurrent layers have such a state whether they drop anything or not.

    Attributes:
        refusal: what a rank that draws is told.
    """

    refusal: str

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        raise ValueError(self.refusal)


_ON_SOME_RANKS = (StageWeight, StageSlice, StageState, StageSeed)


def layout_of(grid: Grid, parts: Sequence[int], shape: tuple[int, ...], part: int) -> Repeated:
    """Return the layout of an array that belongs to one part of a model.

    Args:
        grid: the grid.
        parts: for each rank of a pipeline the number of the part that it holds.
        shape: shape of the array.
        part: number of its part.
    """
    ranks = [parts[grid.stage(rank)] for rank in range(grid.replicas)]
    return Repeated.of(Owned(shape, len({*parts}), part), ranks)


def slice_of_part(grid: Grid, parts: Sequence[int], weight: SplitWeight, part: int) -> Repeated:
    """Return the layout of a weight of which the replicas of one part of a model hold slices."""
    ranks = [
        own if parts[grid.stage(rank)] == part else None
        for rank, own in enumerate(weight.layout.team_ranks)
    ]
    return Repeated.of(weight.layout.inner, ranks)


def give_to_stages(model: Any, stages: Stages, grid: Grid) -> None:
    """Leave a model's weights on the replicas of their stages only.

    A weight that several parts of the model use stays a copy on each replica. What an earlier
    model has left on replicas stays there.
    """
    for variable in model.variables:
        parts = stages.parts_of_weight(variable)
        if parts and not hasattr(native(variable), "stage_part"):
            _give(variable, stages, grid, parts)
            own = native(variable)
            own.stage_part = parts[0] if isinstance(own, _ON_SOME_RANKS) else None


def _give(variable: Any, stages: Stages, grid: Grid, parts: Sequence[int]) -> None:
    """Leave a weight on the replicas of these parts of a model only."""
    own = native(variable)
    if isinstance(own, SplitWeight) and len(parts) == 1:
        layout = slice_of_part(grid, stages.parts, own, parts[0])
        with placing(Placement(layout, kind=StageSlice, team=own.team)):
            make_anew(variable)
        native(variable).keras_path = variable.path
        return
    if not isinstance(own, Weight) or isinstance(own, Placed):
        return
    refusal = _refusal_of_state(variable, stages, parts)
    if refusal is not None and isinstance(own, Statistic):
        raise ValueError(refusal)
    if refusal is not None and isinstance(own, Seed):
        become(own, UndrawnSeed)
        own.refusal = refusal
        return
    if len(parts) > 1:
        return
    layout = layout_of(grid, stages.parts, tuple(variable.shape), parts[0])
    if type(own) is Weight and own.dtype.is_floating:
        with placing(Placement(layout, kind=StageWeight)):
            make_anew(variable)
        native(variable).keras_path = variable.path
        hooks.ASSIGN_SLOT.put(variable, assign_part, weakly=True)
    else:
        become(own, StageSeed if isinstance(own, Seed) else StageState)
        own.layout = layout


def _refusal_of_state(variable: Any, stages: Stages, parts: Sequence[int]) -> str | None:
    """Return why a state would be computed by several ranks, each from its own rows; or None."""
    if len(parts) > 1:
        return _SHARED_STATE.format(path=variable.path, stages=stages.of_weight(variable))
    ranks = [rank for rank, part in enumerate(stages.parts) if part == parts[0]]
    return _STATE_ON_TWO_RANKS.format(path=variable.path, ranks=ranks) if len(ranks) > 1 else None


def is_of_one_stage(weight: Any) -> bool:
    """Return whether the replicas of one stage hold a weight, and others hold nothing of it."""
    return isinstance(native(weight), (StageWeight, StageSlice))
