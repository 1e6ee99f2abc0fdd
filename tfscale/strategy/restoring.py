"""Checkpoints that are restored while a model is built, or while its first step is traced.

TensorFlow defers what it cannot restore yet, and restores a variable as soon as somebody has made
the variable. Keras makes variables of layers before it gives them values. Optimizers may make
variables in their first step, where the first replica makes them for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfscale.bridge.hooks import RESTORE
from tfscale.bridge.stateless import call_when_variables_have_values
from tfscale.bridge.tensorflow import CheckpointPosition, eager_mode
from tfscale.strategy.step import Step, during, on_a_replica


def restore_on_all_replicas(strategy: tf.distribute.Strategy) -> None:
    """Restore what a replica makes in a step on all replicas, as long as a strategy lives.

    A replica would restore its own copy alone, and the value would count as one that the step
    computes.
    """
    RESTORE.put(CheckpointPosition, _restore, while_lives=strategy)


def _restore(restore: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    def restored() -> None:
        with _outside_of_replicas():
            restore(*args, **kwargs)

    call_when_variables_have_values(restored)


@contextlib.contextmanager
def _outside_of_replicas() -> Iterator[None]:
    """Let code that a replica runs run as outside of replicas, eagerly."""
    if not on_a_replica():
        yield
        return
    # A graph knows whether a replica traces it: a new one begins outside of replicas.
    scope = tf.distribute.Strategy.scope(tf.distribute.get_strategy())
    with tf.Graph().as_default(), eager_mode(), scope, during(Step()):
        yield
