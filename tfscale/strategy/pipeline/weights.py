"""Weights of a pipeline: each replica holds those of its stage."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.objects import make_anew, native
from tfscale.bridge.tensorflow import become
from tfscale.parallel.grid import Grid
from tfscale.parallel.layout import Owned, Repeated
from tfscale.strategy.grid.weights import SplitWeight
from tfscale.strategy.pipeline.stages import Stages
from tfscale.strategy.step import on_a_replica, this_step
from tfscale.strategy.variables import (
    OwnedCopy,
    Placed,
    Placement,
    Seed,
    Statistic,
    Weight,
    assign_part,
    placing,
)

_SHARED_STATE = (
    "the layer that has {path} is called in stages {stages}, and each stage would compute this "
    "state from rows of its own. Call the layer in one stage, or choose other cuts"
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
            assigned.append(self)
        return super()._update_replica(update_fn, value, **kwargs)


class StageSeed(Seed):
    """State of a random generator of one stage."""

    layout: Repeated

    def _get_cross_replica(self) -> tf.Tensor:
        extended = self.distribute_strategy.extended
        common = [v.read_value() - self._fold(i) for i, v in enumerate(self.values)]
        return extended.whole(self.layout, common, f"the seed {self._common_name}")


def layout_of(grid: Grid, shape: tuple[int, ...], rank: int) -> Repeated:
    """Return the layout of an array that one rank of each pipeline holds."""
    ranks = [grid.stage(each) for each in range(grid.replicas)]
    return Repeated.of(Owned(shape, grid.stages, rank), ranks)


def slice_of_stage(grid: Grid, weight: SplitWeight, stage: int) -> Repeated:
    """Return the layout of a weight of which the replicas of one stage hold slices."""
    ranks = [
        own if grid.stage(rank) == stage else None
        for rank, own in enumerate(weight.layout.team_ranks)
    ]
    return Repeated.of(weight.layout.inner, ranks)


def give_to_stages(model: Any, stages: Stages, grid: Grid) -> None:
    """Leave a model's weights on the replicas of their stages only.

    A weight that several ranks use stays a copy on each replica.
    """
    for variable in model.variables:
        own, ranks = native(variable), stages.ranks_of_weight(variable)
        if isinstance(own, SplitWeight) and len(ranks) == 1:
            layout = slice_of_stage(grid, own, ranks[0])
            with placing(Placement(layout, kind=StageSlice, team=own.team)):
                make_anew(variable)
            native(variable).keras_path = variable.path
            continue
        if not isinstance(own, Weight) or isinstance(own, Placed) or not ranks:
            continue
        if len(ranks) > 1:
            if isinstance(own, (Statistic, Seed)):
                used = stages.of_weight(variable)
                raise ValueError(_SHARED_STATE.format(path=variable.path, stages=used))
            continue
        layout = layout_of(grid, tuple(variable.shape), ranks[0])
        if type(own) is Weight and own.dtype.is_floating:
            with placing(Placement(layout, kind=StageWeight)):
                make_anew(variable)
            native(variable).keras_path = variable.path
            hooks.ASSIGN_SLOT.put(variable, assign_part, weakly=True)
        else:
            become(own, StageSeed if isinstance(own, Seed) else StageState)
            own.layout = layout


def is_of_one_stage(weight: Any) -> bool:
    """Return whether the replicas of one stage hold a weight, and others hold nothing of it."""
    return isinstance(native(weight), (StageWeight, StageSlice))
