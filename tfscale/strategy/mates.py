"""``all_gather`` in steps that not all replicas make together: over those that do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfscale.bridge.hooks import ALL_GATHER
from tfscale.bridge.tensorflow import replica_id
from tfscale.exchange.exchange import Exchange
from tfscale.strategy.current import current


def gathering(everybody: Exchange) -> AbstractContextManager[None]:
    """Within this context a replica gathers from those with which it makes the step.

    TensorFlow's own gathers from all, in a thread that does not know of the step.

    Args:
        everybody: the collectives of all replicas.
    """
    context = tf.distribute.get_replica_context()
    return ALL_GATHER.on(context, functools.partial(_all_gather, everybody))


def _all_gather(
    everybody: Exchange,
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
    exchange = current.group if current.alone is True else everybody
    return _Mates(exchange, context, axis).all_gather(value, axis)


class _Mates:
    """What TensorFlow's ``all_gather`` asks of a replica, for it and for its gradient."""

    def __init__(self, exchange: Exchange, context: Any, axis: int) -> None:
        rank = exchange.communicators[replica_id(context)].rank
        self.all_reduce = context.all_reduce
        # A replica may be alone in some steps: it is the first of those that make it.
        first = tf.where(current.alone, 0, rank)
        self.replica_id_in_sync_group = rank if current.alone is True else first
        self._exchange, self._context, self._axis = exchange, context, axis

    def merge_call(self, _: Any, args: Any) -> Any:
        """The values of all, joined."""
        exchange, axis, own = self._exchange, self._axis, list(args)

        def joined() -> list[Any]:
            return exchange.together(
                lambda replica, given: [exchange.rows(replica, x, axis) for x in given], own
            )

        return joined() if current.alone is True else tf.cond(current.alone, lambda: own, joined)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """As TensorFlow does it."""
        mates = _Mates(self._exchange, self._context, axis)
        return type(self._context).all_gather(mates, value, axis, options)
