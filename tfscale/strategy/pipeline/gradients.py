"""Gradients of a pipeline: what each stage has computed, for all weights of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import native
from tfscale.bridge.protocols import Variable
from tfscale.bridge.tensorflow import own_copy
from tfscale.exchange.rows import joined_rows, sum_of_microbatches
from tfscale.exchange.team import Team
from tfscale.parallel.grid import DATA, STAGES, TENSOR
from tfscale.strategy.grid.gradients import GridGradients
from tfscale.strategy.grid.teams import GridTeams
from tfscale.strategy.grid.weights import is_split
from tfscale.strategy.pipeline.weights import is_of_one_stage
from tfscale.strategy.shards.sharded_clipping import summed_numbers
from tfscale.strategy.teams import Teams


class StageGradients(GridGradients):
    """Sums and norms of the gradients of weights that stages hold, whole or in slices.

    Args:
        teams: teams of the grid, with a team along the axis ``stages``.
        parts: for each rank of a pipeline the number of the part of the model that it holds.
    """

    def __init__(self, teams: GridTeams, parts: Sequence[int]) -> None:
        super().__init__(teams.tensor, teams.twins(DATA, parts=parts), teams.everybody)
        assert teams.stages is not None
        self._stages: Team = teams.stages
        self._share = len({*parts}) / len(parts)  # which each rank has of what its part has
        self._of_stage = teams.twins(DATA, TENSOR, parts=parts)
        self._of_slice = teams.twins(DATA, STAGES)

    def twins_of(self, variable: Variable) -> Teams | None:
        """See ``GridGradients``."""
        if not is_of_one_stage(variable):
            return self._of_slice if is_split(variable) else None
        return self._twins if is_split(variable) else self._of_stage

    def squares(
        self, optimizer: Any, variables: Sequence[Variable], own: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return sums of squares; those of all stages' weights are added up for a global norm."""
        own = super().squares(optimizer, variables, own)
        if not optimizer.global_clipnorm:
            return own
        parts = [is_of_one_stage(v) for v in variables]
        held = [x for x, part in zip(own, parts, strict=True) if part]
        copies = [x for x, part in zip(own, parts, strict=True) if not part]
        # Stages may hold weights of different types, and all send numbers of one type.
        total = tf.add_n([tf.zeros([], tf.float64), *(tf.cast(x, tf.float64) for x in held)])
        total = total * self._share
        return [*summed_numbers(self._stages, [total], "square of the norm of stages"), *copies]


class Accumulated:
    """Gradients of the microbatches of a step, added up."""

    def __init__(self) -> None:
        self._dense: dict[int, tf.Tensor] = {}
        self._rows: dict[int, dict[int, list[tf.IndexedSlices]]] = {}  # by weight and stage

    def add(self, stage: int, weights: Sequence[Variable], gradients: Sequence[Any]) -> None:
        """Add the gradients of a stage and a microbatch; None adds nothing."""
        for weight, gradient in zip(weights, gradients, strict=True):
            key = id(weight)
            if isinstance(gradient, tf.IndexedSlices):
                self._rows.setdefault(key, {}).setdefault(stage, []).append(gradient)
            elif gradient is not None:
                before = self._dense.get(key)
                self._dense[key] = gradient if before is None else before + gradient

    def of(self, weight: Variable) -> Any:
        """Return the gradient of a weight; None if it has none."""
        rows, dense = self._rows.get(id(weight)), self._dense.get(id(weight))
        if rows is None:
            return dense
        joined = joined_rows([sum_of_microbatches(each) for each in rows.values()])
        return joined if dense is None else dense + tf.convert_to_tensor(joined)

    def tensors(self) -> list[tf.Tensor]:
        """Return what later turns wait for."""
        stages = [each for of_weight in self._rows.values() for each in of_weight.values()]
        rows = [slices.values for each in stages for slices in each]
        return [*self._dense.values(), *rows]

    def of_all(
        self, weights: Sequence[Variable], held: set[int], tables: set[int]
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Return a gradient for each weight of the model.

        The gradient of what another replica holds is empty. Gradients of copies are of one kind on
        all replicas, for stages may use one weight in different ways: rows of tables, else dense.

        Args:
            weights: trainable weights of the model.
            held: ids of the weights that this replica's stages use.
            tables: ids of the weights of which all stages only look up rows.
        """
        found = []
        for weight in weights:
            own = self.of(weight)
            if is_of_one_stage(weight):
                dtype = tf.as_dtype(weight.dtype)
                found.append(own if id(weight) in held else tf.zeros([0], dtype))
            else:
                found.append((_as_rows if id(weight) in tables else _as_dense)(own, weight))
        return found


def _as_dense(gradient: Any, weight: Variable) -> tf.Tensor:
    if gradient is None:
        return tf.zeros(own_copy(native(weight)).shape, tf.as_dtype(weight.dtype))
    return tf.convert_to_tensor(gradient)


def _as_rows(gradient: Any, weight: Variable) -> tf.IndexedSlices:
    """Return a gradient as rows, of which there may be none.

    Replicas with other stages have other graphs. So no graph may show which rows these are, as
    the way in which replicas sum rows depends on that: see ``exchange/lookups.py``.
    """
    shape = own_copy(native(weight)).shape
    if gradient is None:
        gradient = tf.IndexedSlices(
            tf.zeros([0, *shape[1:]], tf.as_dtype(weight.dtype)), tf.zeros([0], tf.int64)
        )
    elif not isinstance(gradient, tf.IndexedSlices):
        gradient = tf.IndexedSlices(gradient, tf.range(shape[0]))
    indices = tf.cast(gradient.indices, tf.int64)
    hidden = tf.raw_ops.PlaceholderWithDefault(input=indices, shape=[None])
    return tf.IndexedSlices(gradient.values, hidden, tf.constant(shape.as_list(), tf.int64))
