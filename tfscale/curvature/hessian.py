"""Matrices of second derivatives of a model's loss on its data, on all replicas."""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.bridge.data import Batches
from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.objects import path_of
from tfscale.curvature import processes
from tfscale.curvature.derivatives import again, dense
from tfscale.curvature.objective import Objective
from tfscale.curvature.operator import Operator


class Hessian(Operator):
    r"""The Hessian of a model's loss, as a matrix that is never formed.

    Args:
        model: compiled.
        x: inputs, or a ``tf.data.Dataset`` or ``keras.utils.PyDataset`` of all.
        y: targets.
        sample_weight: of each row.
        batch_size: rows of a batch, of arrays.
        steps: how many batches to read; all by default.
        variables: of which the loss is a function: regular expressions, searched in their paths,
            or variables; all trainable ones by default.

    Example:
        >>> import keras, numpy as np
        >>> from tfscale import curvature
        >>> model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
        >>> model.compile(loss="mse")
        >>> h = curvature.Hessian(model, np.array([[1.0], [2.0]]), np.zeros([2, 1]))
        >>> print(h @ np.ones(1))
        [5.]
    """

    def __init__(
        self,
        model: keras.Model,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None = None,
        steps: int | None = None,
        variables: str | Iterable[Any] | None = None,
    ) -> None:
        who = f"curvature.{type(self).__name__}"
        if KERAS_2:
            raise ValueError(f"{who} needs Keras 3, and this is Keras {keras.__version__}")
        if not getattr(model, "compiled", False):
            raise ValueError(
                f"{who} needs the loss of the model, and {model.name!r} is not compiled: call "
                "model.compile(loss=...)"
            )
        processes.check(model, who)
        self.model = model
        self._batches = Batches(model, (x, y, sample_weight), batch_size, steps, who)
        self.variables = _chosen(model, variables)
        self._objective = Objective(model, self.variables, training=False)
        sizes = [int(np.prod(v.shape)) for v in self.variables]
        ends = list(itertools.accumulate(sizes, initial=0))
        parts = {
            path_of(v): slice(*both)
            for v, both in zip(self.variables, itertools.pairwise(ends), strict=True)
        }
        dtypes = {tf.as_dtype(v.dtype).as_numpy_dtype for v in self.variables}
        super().__init__(parts, np.float64 if dtypes == {np.float64} else np.float32)
        self._function = tf.function(self._on_replicas, autograph=False, reduce_retracing=True)

    def products(self, vectors: np.ndarray) -> np.ndarray:
        """The products with vectors, each of which is a row: rows in float64."""
        sums, rows = np.zeros(vectors.shape), 0.0
        pieces = [self._tensors(vector) for vector in vectors]
        strategy = self.model.distribute_strategy
        for batch in self._batches:
            count, products = self._function(batch, pieces)
            rows += float(strategy.experimental_local_results(count)[0])
            for part, product in zip(self.parts.values(), products, strict=True):
                for one in strategy.experimental_local_results(product):
                    sums[:, part] += one.numpy().reshape(len(vectors), -1)
        return sums / rows

    def _tensors(self, vector: np.ndarray) -> list[tf.Tensor]:
        return [
            tf.constant(vector[part].reshape(v.shape), v.dtype)
            for part, v in zip(self.parts.values(), self.variables, strict=True)
        ]

    def _on_replicas(self, batch: Any, vectors: Sequence[list[tf.Tensor]]) -> Any:
        @tf.autograph.experimental.do_not_convert
        def test_step(_: Any, data: Any) -> Any:
            count = _rows(data)
            values = self._objective.values()
            loss = self._objective.loss(values, data)
            gradients = [dense(g, v) for g, v in zip(tf.gradients(loss, values), values)]
            products = [again(gradients, values, vector) for vector in vectors]
            of_all = tf.cast(count, tf.float64)
            return count, [
                tf.stack([of_all * tf.cast(dense(p, v), tf.float64) for p in each])
                for each, v in zip(zip(*products), values, strict=True)
            ]

        # A strategy knows a step of a model by its name.
        step = types.MethodType(test_step, self.model)
        return self.model.distribute_strategy.run(step, args=(batch,))


def _rows(data: Any) -> tf.Tensor:
    return tf.shape(tf.nest.flatten(data)[0])[0]


def _chosen(model: keras.Model, rules: str | Iterable[Any] | None) -> list[Any]:
    every = list(model.trainable_variables)
    if rules is None:
        return every
    rules = [rules] if isinstance(rules, str) else list(rules)
    patterns = [rule for rule in rules if isinstance(rule, str)]
    given = {id(rule) for rule in rules}
    return [
        v for v in every
        if id(v) in given or any(re.search(pattern, path_of(v)) for pattern in patterns)
    ]  # fmt: skip
