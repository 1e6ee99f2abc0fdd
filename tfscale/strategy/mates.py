"""``all_gather`` over the replicas that make a step together, if not all replicas do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfscale.bridge.hooks import ALL_GATHER
from tfscale.bridge.tensorflow import replica_id
from tfscale.exchange.team import Team
from tfscale.strategy.current import current


def gathering(everybody: Team) -> AbstractContextManager[None]:
    """Make ``all_gather`` gather, within this context, from the replicas that share the step.

    TensorFlow's method gathers from all replicas, in a thread without the state of the step.

    Args:
        everybody: collectives of all replicas.
    """
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
    if current.reduced or current.alone is False:
        return gather(context, value, axis, options)
    if current.alone is True and current.group is None:
        return value
    team = current.group if current.alone is True else everybody
    return _Mates(team, context, axis).all_gather(value, axis)


class _Mates:
    """Stand-in for a replica's context, for TensorFlow's ``all_gather`` and for its gradient."""

    def __init__(self, team: Team, context: Any, axis: int) -> None:
        rank = team.communicators[replica_id(context)].rank
        self.all_reduce = context.all_reduce
        # In a step that a replica makes alone, its number is 0.
        first = tf.where(current.alone, 0, rank)
        self.replica_id_in_sync_group = rank if current.alone is True else first
        self._team, self._context, self._axis = team, context, axis

    def merge_call(self, _: Any, args: Any) -> Any:
        """Return the values of all replicas that share the step, joined along the axis."""
        team, axis, own = self._team, self._axis, list(args)

        def joined() -> list[Any]:
            return team.together(
                lambda replica, given: [team.concat(replica, x, axis) for x in given], own
            )

        return joined() if current.alone is True else tf.cond(current.alone, lambda: own, joined)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Gather along ``axis`` by TensorFlow's method."""
        mates = _Mates(self._team, self._context, axis)
        return type(self._context).all_gather(mates, value, axis, options)
