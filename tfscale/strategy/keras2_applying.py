"""Hooks that make an optimizer of Keras 2 apply sums over all replicas; see steps.py.

tensorflow-addons needs Keras 2. Keras 2 itself sums gradients before it clips them, and collects
logs and predictions of several workers. So the strategy changes less: it sends the sums through its
buckets and wires. Some results are not exact, as under TensorFlow's strategies: batches that do not
divide evenly, masked and weighted losses, local statistics of batch normalization.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.fit import fitted
from tfscale.bridge.objects import measures_curvature
from tfscale.bridge.protocols import Optimizer
from tfscale.exchange.slots import Slots
from tfscale.strategy.gradients import sum_of_curvature
from tfscale.strategy.protocols import Strategy


@contextlib.contextmanager
def summing(strategy: Strategy, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Make these optimizers, and that of the model in ``fit``, sum by buckets in this context."""
    model = fitted()
    of_model = getattr(model, "optimizer", None)
    used = {id(one): one for one in [*optimizers, *([of_model] if of_model else [])]}
    with contextlib.ExitStack() as stack:
        for optimizer in used.values():
            for hook in _SUMS:
                if hasattr(optimizer, hook.name):
                    stack.enter_context(hook.on(optimizer, functools.partial(_sums, strategy)))
        yield


# Hooks of the two kinds of optimizers of Keras 2.
_SUMS = (hooks.AGGREGATE_GRADIENTS, hooks.LEGACY_AGGREGATE_GRADIENTS)


def _sums(
    strategy: Strategy, _: Callable[..., Any], optimizer: Optimizer, grads_and_vars: Any
) -> list[tuple[Any, Any]]:
    gradients, variables = map(list, zip(*grads_and_vars, strict=True))
    if isinstance(optimizer, keras.optimizers.Optimizer):
        with tf.init_scope():
            optimizer.build(variables)
    state = Slots.of(optimizer, strategy)
    strategy.reducer.prepare(state, optimizer, variables, gradients)
    curvature = []
    if measures_curvature(optimizer):
        curvature = optimizer.curvature(gradients, variables, unscaled=True)
    sums = strategy.reducer.reduce(gradients, variables, optimizer, state)
    if measures_curvature(optimizer):
        optimizer.give(sum_of_curvature(strategy, optimizer, variables, curvature))
    return list(zip(sums, variables, strict=True))
