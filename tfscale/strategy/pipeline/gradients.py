"""Gradients of a pipeline: what each stage has computed, for all weights of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.protocols import Optimizer, Variable
from tfscale.strategy.grid.gradients import GridGradients
from tfscale.strategy.pipeline.weights import is_of_one_stage
from tfscale.strategy.sharded_clipping import summed_numbers


class StageGradients(GridGradients):
    """Sums and norms of the gradients of weights that stages hold, whole."""

    def is_part(self, variable: Variable) -> bool:
        """See ``GridGradients``."""
        return is_of_one_stage(variable)

    def refuse(self, optimizer: Optimizer, variables: Sequence[Variable]) -> None:
        """See ``GridGradients``: a stage holds whole weights, which all optimizers can update."""

    def squares(
        self, optimizer: Any, variables: Sequence[Variable], own: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return sums of squares; those of all stages' weights are added up for a global norm."""
        if not optimizer.global_clipnorm:
            return own
        parts = [self.is_part(v) for v in variables]
        held = [tf.cast(x, tf.float32) for x, part in zip(own, parts, strict=True) if part]
        copies = [x for x, part in zip(own, parts, strict=True) if not part]
        total = tf.add_n(held) if held else tf.zeros([])
        return [*summed_numbers(self._parts, [total], "square of the norm of stages"), *copies]


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
        two gradients of one row differently from their sum.
        """
        rows, dense = self._rows.get(id(weight)), self._dense.get(id(weight))
        if rows is None:
            return dense
        joined = tf.IndexedSlices(
            tf.concat([x.values for x in rows], 0),
            tf.concat([x.indices for x in rows], 0),
            rows[0].dense_shape,
        )
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
                found.append(tf.zeros(weight.shape, dtype))
            else:
                found.append(tf.convert_to_tensor(own))
        return found
