"""``all_gather`` over the replicas that make a step together, if not all replicas do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from tfscale.bridge.hooks import ALL_GATHER
from tfscale.bridge.tensorflow import replica_id
from tfscale.exchange.team import Team
from tfscale.strategy.step import Step, this_step


def over_team(step: Step, everybody: Team) -> AbstractContextManager[None]:
    """Make ``all_gather`` gather, within this context, from the replicas of a step's team.

    TensorFlow's method gathers from all replicas, in a thread without the state of the step.

    Args:
        step: the step that begins.
        everybody: collectives of all replicas.
    """
    if step.is_of_all and step.stage is None:
        return nullcontext()
    context = tf.distribute.get_replica_context()
    return ALL_GATHER.on(context, functools.partial(_all_gather, everybody))


def _all_gather(
    everybody: Team,
    gather: Callable[..., Any],
    context: Any,
    value: Any,
    axis: int,
    options: Any = None,
) -> Any:
    step = this_step()
    if step.is_reduced or (step.is_of_all and step.stage is None):
        return gather(context, value, axis, options)
    if step.is_single:
        return value
    return _TeamContext(step, everybody, context, axis).all_gather(value, axis)


class _TeamContext:
    """Stand-in for a replica's context, for TensorFlow's ``all_gather`` and for its gradient."""

    def __init__(self, step: Step, everybody: Team, context: Any, axis: int) -> None:
        self.all_reduce = context.all_reduce
        self.replica_id_in_sync_group = step.rank_in_team(everybody, replica_id(context))
        self._step, self._everybody, self._context, self._axis = step, everybody, context, axis

    def merge_call(self, _: Any, args: Any) -> Any:
        """Return the values of all replicas that share the step, joined along the axis."""

        def joined(team: Team, own: list[Any]) -> list[Any]:
            return team.together(
                lambda replica, given: [team.concat(replica, x, self._axis) for x in given], own
            )

        return self._step.together(self._everybody, joined, list(args))

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Gather along ``axis`` by TensorFlow's method."""
        context = _TeamContext(self._step, self._everybody, self._context, axis)
        return type(self._context).all_gather(context, value, axis, options)
