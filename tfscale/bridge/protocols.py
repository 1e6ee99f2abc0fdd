"""Types of Keras's objects, with all that tfscale asks of them, so that mypy checks that.

Keras carries no types, so these say what both Keras 2 and 3, and tensorflow-addons, must have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import tensorflow as tf


class Variable(Protocol):
    """A variable of Keras or TensorFlow, or one that replicas hold copies of."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tf.TensorShape: ...
    @property
    def dtype(self) -> tf.DType | str: ...


class Metric(Protocol):
    """A metric of Keras."""

    name: str
    dtype: Any
    variables: Sequence[Variable]

    def result(self) -> Any: ...
    def update_state(self, values: Any, sample_weight: Any = None) -> None: ...


class Layer(Protocol):
    """A layer of Keras, or a model within a model."""

    name: str
    built: bool
    _layers: Sequence[Layer]  # its parts
    _reduction_axes: Sequence[int]  # in batch normalization alone

    def add_loss(self, loss: Any) -> None: ...
    def get_config(self) -> dict[str, Any]: ...


class Optimizer(Protocol):
    """An optimizer of Keras."""

    name: str
    variables: Sequence[Variable]
    iterations: Variable
    learning_rate: Any
    built: bool
    gradient_accumulation_steps: int | None
    loss_scale_factor: float | None
    _trainable_variables: Sequence[Variable]
    _iterations: Variable
    _learning_rate: Any

    def build(self, variables: Sequence[Variable]) -> None: ...
    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[Variable] | None = None
    ) -> None: ...
    def get_config(self) -> dict[str, Any]: ...
    def _clip_gradients(self, grads: Sequence[Any]) -> list[Any]: ...


class MeasuresCurvature(Optimizer, Protocol):
    """An optimizer such as AdaHessian, which measures more than gradients on each replica."""

    update_each: int

    def curvature(
        self, gradients: Sequence[Any], variables: Sequence[Variable], unscaled: bool = False
    ) -> list[Any]: ...
    def curvature_is_due(self) -> tf.Tensor: ...
    def given(self, curvature: Sequence[Any]) -> contextlib.AbstractContextManager[None]: ...
    def give(self, curvature: Sequence[Any]) -> None: ...


class Model(Layer, Protocol):
    """A model of Keras."""

    optimizer: Any
    variables: Sequence[Any]
    metrics: Sequence[Metric]

    def _flatten_layers(self, include_self: bool = True) -> Iterable[Layer]: ...
