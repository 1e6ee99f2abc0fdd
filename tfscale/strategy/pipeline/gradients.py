"""Gradients of a pipeline: what each stage has computed, for all weights of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import native
from tfscale.bridge.protocols import Variable
from tfscale.bridge.tensorflow import own_copy
from tfscale.exchange import lookups
from tfscale.exchange.rows import with_unique_rows
from tfscale.exchange.team import Team
from tfscale.parallel.grid import DATA, STAGES, TENSOR
from tfscale.strategy.grid.gradients import GridGradients
from tfscale.strategy.grid.teams import GridTeams, Twins
from tfscale.strategy.grid.weights import is_split
from tfscale.strategy.pipeline.weights import is_of_one_stage
from tfscale.strategy.sharded_clipping import summed_numbers


class StageGradients(GridGradients):
    """Sums and norms of the gradients of weights that stages hold, whole or in slices.

    Args:
        teams: teams of the grid, with a team along the axis ``stages``.
    """

    def __init__(self, teams: GridTeams) -> None:
        super().__init__(teams.tensor, teams.twins(DATA), teams.everybody)
        assert teams.stages is not None
        self._stages: Team = teams.stages
        self._of_stage = teams.twins(DATA, TENSOR)
        self._of_slice = teams.twins(DATA, STAGES)

    def twins_of(self, variable: Variable) -> Twins | None:
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
        return [*summed_numbers(self._stages, [total], "square of the norm of stages"), *copies]


class Accumulated:
    """Gradients of the microbatches of a step, added up."""

    def __init__(self) -> None:
        self._dense: dict[int, tf.Tensor] = {}
        self._rows: dict[int, list[tf.IndexedSlices]] = {}

    def add(self, weights: Sequence[Variable], gradients: Sequence[Any]) -> None:
        """Add the gradients of a microbatch; None adds nothing."""
        for weight, gradient in zip(weights, gradients, strict=True):
            key = id(weight)
            if isinstance(gradient, tf.IndexedSlices):
                self._rows.setdefault(key, []).append(gradient)
            elif gradient is not None:
                before = self._dense.get(key)
                self._dense[key] = gradient if before is None else before + gradient

    def of(self, weight: Variable) -> Any:
        """Return the gradient of a weight; None if it has none.

        Rows stay apart, as they are in the gradient of a whole batch: optimizers and norms treat
        two gradients of one row differently from their sum. Rows that a layer has made unique are
        unique in the sum, too.
        """
        rows, dense = self._rows.get(id(weight)), self._dense.get(id(weight))
        if rows is None:
            return dense
        joined = tf.IndexedSlices(
            tf.concat([x.values for x in rows], 0),
            tf.concat([x.indices for x in rows], 0),
            rows[0].dense_shape,
        )
        if lookups.are_unique(rows[0].indices):
            joined = with_unique_rows(joined)
        return joined if dense is None else dense + tf.convert_to_tensor(joined)

    def tensors(self) -> list[tf.Tensor]:
        """Return what later turns wait for."""
        rows = [slices.values for every in self._rows.values() for slices in every]
        return [*self._dense.values(), *rows]

    def of_all(self, weights: Sequence[Variable], held: set[int]) -> list[Any]:
        """Return a gradient for each weight of the model.

        The gradient of what another replica holds is empty. Those of copies are dense on all
        replicas, for stages may use one weight in different ways.

        Args:
            weights: trainable weights of the model.
            held: ids of the weights that this replica's stages use.
        """
        found = []
        for weight in weights:
            own = self.of(weight)
            dtype = tf.as_dtype(weight.dtype)
            if is_of_one_stage(weight):
                found.append(own if id(weight) in held else tf.zeros([0], dtype))
            elif own is None:
                found.append(tf.zeros(own_copy(native(weight)).shape, dtype))
            else:
                found.append(tf.convert_to_tensor(own))
        return found
