"""What applying.py does, for Keras 2, which tensorflow-addons needs.

Keras 2 itself sums gradients before it clips them, and collects logs and predictions of
several workers. So the strategy changes less: it sends the sums through its buckets and
wires. Some results are not exact, as under TensorFlow's strategies: batches that do not
divide, masked and weighted losses, local statistics of batch normalization.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.fit import fitted
from tfscale.bridge.shadow import shadowed
from tfscale.exchange.reducer import whole
from tfscale.exchange.state import ExchangeState


@contextlib.contextmanager
def hooked(strategy: Any, optimizers: Iterable[Any]) -> Iterator[None]:
    """While it lasts, these and the optimizer of the model in ``fit`` sum by buckets."""
    model = fitted()
    used = {id(one): one for one in [*optimizers, getattr(model, "optimizer", None)]}
    with contextlib.ExitStack() as stack:
        for optimizer in used.values():
            for name in filter(functools.partial(hasattr, optimizer), _SUMS):
                sums = functools.partial(_sums, strategy, optimizer)
                stack.enter_context(shadowed(optimizer, name, sums))
        yield


# Of optimizers of the first and of the second kind.
_SUMS = ("aggregate_gradients", "_aggregate_gradients")


def _sums(strategy: Any, optimizer: Any, grads_and_vars: Any) -> list[tuple[Any, Any]]:
    gradients, variables = map(list, zip(*grads_and_vars, strict=True))
    if isinstance(optimizer, keras.optimizers.Optimizer):
        with tf.init_scope():
            optimizer.build(variables)
    state = ExchangeState.of(optimizer, strategy)
    strategy.reducer.prepare(state, optimizer, whole(gradients, variables))
    measured = _curvature(optimizer, gradients, variables)
    apart = bool(measured) and optimizer.update_each > 1
    travels = [] if apart else measured
    sums = strategy.reducer.reduce(gradients, variables, optimizer, state, travels)
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
