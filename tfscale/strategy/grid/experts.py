"""Experts of a grid: tokens travel to the replicas that hold their experts, and back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.protocols import Layer
from tfscale.exchange.team import Team
from tfscale.parallel.dispatch import Dispatch
from tfscale.parallel.experts import Experts
from tfscale.strategy.grid.collectives import exchanged
from tfscale.strategy.grid.layers import seeing_parts
from tfscale.strategy.step import on_a_replica, this_step


class SharedExperts:
    """Layers of experts that compute on the replicas of a team, each with its share of the experts.

    Args:
        team: the team.
    """

    def __init__(self, team: Team) -> None:
        self._team = team

    @contextlib.contextmanager
    def computing(self, layers: Sequence[Layer]) -> Iterator[None]:
        """Make these layers compute with their shares, on replicas, within this context."""
        with contextlib.ExitStack() as stack:
            for layer in layers:
                # A call of the user's own reads whole weights.
                if isinstance(layer, Experts) and type(layer).call is Experts.call:
                    stack.enter_context(hooks.SPLIT_CALL.on(layer, self._call))
            yield

    def _call(
        self,
        original: Callable[..., Any],
        layer: Experts,
        inputs: Any,
        mask: Any = None,
        training: bool | None = None,
    ) -> Any:
        if not on_a_replica() or this_step().is_reduced:
            return original(layer, inputs, mask=mask, training=training)
        compute = functools.partial(self._computed, layer)
        return layer.routed(inputs, mask, training, compute)

    def _computed(self, layer: Experts, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Return what all experts make of this replica's rows, which are sorted by expert."""
        team, share = self._team, layer.experts // self._team.size
        name = f"numbers of rows to {layer.name}"
        came = team.together_on_one(
            lambda replica, own: team.all_to_all(replica, own, name), counts
        )
        came = tf.reshape(came, [team.size, share])
        sizes = tf.reduce_sum(tf.reshape(counts, [team.size, share]), 1)
        received = tf.reduce_sum(came, 1)
        there = exchanged(team, rows, sizes, received, f"rows to {layer.name}")
        expert = tf.repeat(tf.tile(tf.range(share), [team.size]), tf.reshape(came, [-1]))
        dispatch = Dispatch.of(expert, share)
        with seeing_parts():
            own = layer.computed(dispatch.rows(there), dispatch.counts)
        (results,) = tf.unstack(dispatch.results(own))
        return exchanged(team, results, received, sizes, f"rows from {layer.name}")
