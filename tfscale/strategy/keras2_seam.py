"""Where the strategy meets Keras 2, which tensorflow-addons needs; see keras_seam.py.

Keras 2 itself sums gradients before it clips them, and collects logs and predictions of
several workers. So the strategy changes less: it sends the sums through its buckets and
wires. Some results are not exact, as under TensorFlow's strategies: batches that do not
divide, masked and weighted losses, local statistics of batch normalization.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale.strategy.frames import caller
from tfscale.strategy.gradients import whole
from tfscale.strategy.memory import Memory

# Those of tensorflow-addons are of the second kind, or of the first, as one asks for them.
OPTIMIZERS = (keras.optimizers.Optimizer, keras.optimizers.legacy.Optimizer)


def model_of(fn: Callable[..., Any]) -> None:
    """None: with Keras 2 a step's model is not known."""


def fit_that_begins() -> None:
    """None: the ``fit`` of Keras 2 is not inspected."""


def prepare_to_build(strategy: Any) -> None:
    """Keras 2 builds models as their steps are traced."""


def compiling() -> None:
    """None: the ``compile`` of Keras 2 is not inspected."""


def for_shapes(dataset: Any, distributed: Any, distribute: Any) -> None:
    """None: Keras 2 reads no dataset only for its shapes."""


def wants_only_shapes() -> bool:
    """Whether Keras reads a batch of data for no more than its shapes."""
    return False


def predicts() -> bool:
    """Whether Keras hands out a batch that it has not distributed."""
    return False


def remember(strategy: Any, optimizer: Any) -> None:
    """A file may be loaded into an optimizer before its first step: it needs its memory."""
    Memory.of(optimizer, strategy)


def watch_seeds(strategy: Any) -> None:
    """Layers of Keras 2 keep their seeds to themselves."""


@contextlib.contextmanager
def hooked(strategy: Any, optimizers: Iterable[Any]) -> Iterator[None]:
    """While it lasts, these and the optimizer of the model in ``fit`` sum by buckets."""
    model = caller(keras.Model)
    used = {id(one): one for one in [*optimizers, getattr(model, "optimizer", None)]}
    shadowed = [(one, name) for one in used.values() for name in _SUMS if hasattr(one, name)]
    for optimizer, name in shadowed:
        vars(optimizer)[name] = functools.partial(_sums, strategy, optimizer)
    try:
        yield
    finally:
        for optimizer, name in shadowed:
            vars(optimizer).pop(name, None)


# Of optimizers of the first and of the second kind.
_SUMS = ("aggregate_gradients", "_aggregate_gradients")


def _sums(strategy: Any, optimizer: Any, grads_and_vars: Any) -> list[tuple[Any, Any]]:
    gradients, variables = map(list, zip(*grads_and_vars, strict=True))
    if isinstance(optimizer, keras.optimizers.Optimizer):
        with tf.init_scope():
            optimizer.build(variables)
    memory = Memory.of(optimizer, strategy)
    strategy.reducer.prepare(memory, optimizer, whole(gradients, variables))
    measured = _curvature(optimizer, gradients, variables)
    apart = bool(measured) and optimizer.update_each > 1
    travels = [] if apart else measured
    sums = strategy.reducer.reduce(gradients, variables, optimizer, memory, travels)
    sums, given = sums[: len(variables)], sums[len(variables) :]
    if measured:
        optimizer.give(_summed_if_due(optimizer, measured, variables) if apart else given)
    return list(zip(sums, variables, strict=True))


def _curvature(optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
    """What an optimizer measures besides, if it does; the loss's scale is gone by now."""
    if not hasattr(optimizer, "curvature"):
        return []
    return list(optimizer.curvature(gradients, variables, unscaled=True))


def _summed_if_due(optimizer: Any, curvature: list[Any], variables: list[Any]) -> list[Any]:
    """The sums over replicas in steps that measure, by Keras's own way: None stays None."""
    sum_up = type(optimizer).aggregate_gradients

    def summed() -> list[Any]:
        return [d for d, _ in sum_up(optimizer, zip(curvature, variables, strict=True))]

    return list(tf.cond(optimizer.curvature_is_due(), summed, lambda: curvature))
