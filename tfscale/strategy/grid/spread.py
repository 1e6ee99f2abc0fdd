"""Arrays of a step that a team holds in slices, and what stands for them where a layer is whole.

A layer that computes with a slice returns a tensor that stands for the whole array: it has the
whole shape, and its gradient is that of the gathered array, but no numbers. The next layer that
computes with slices recognizes the tensor, and takes the slice that it stands for. When the step
has been traced, whatever else uses the tensor gets the array, gathered from the team; if nothing
else does, nobody gathers it. So code that knows nothing of slices computes with whole arrays,
whatever it is: a rule cannot change what a program computes.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import tensorflow as tf

from tfscale.bridge.graphs import replace_input
from tfscale.bridge.tensorflow import replica_id
from tfscale.exchange.team import Team
from tfscale.strategy.grid.halo import Spread, by_replica, by_team, summed_slice, whole
from tfscale.strategy.step import on_a_replica, this_step


@dataclasses.dataclass(frozen=True)
class _Shown:
    """A tensor that stands for a whole array.

    Attributes:
        tensor: the tensor.
        spread: the array.
        replica: index of the replica in this process.
        name: name of the layer that made the array.
    """

    tensor: tf.Tensor
    spread: Spread
    replica: int
    name: str


class SpreadArrays:
    """Arrays in slices of the steps that are traced in a context, on all replicas of the process.

    Args:
        team: team of the replicas that hold the slices.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._shown: dict[Any, _Shown] = {}
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        # A replica that has begun the context itself does not see what other replicas do.
        self._thread = threading.get_ident() if on_a_replica() else None

    @property
    def can_be_made(self) -> bool:
        """Whether this replica may compute with slices now.

        Eager steps compute with whole arrays, and so do loops, branches and functions within a
        step, whose graphs are complete before the step has been traced.
        """
        if self._graph is None or not on_a_replica() or this_step().is_reduced:
            return False
        is_here = self._thread in (None, threading.get_ident())
        return is_here and tf.compat.v1.get_default_graph() is self._graph

    def of(self, x: Any) -> Spread | None:
        """Return the array that a tensor stands for; None if the tensor is an ordinary one."""
        found = self._shown.get(x.ref()) if isinstance(x, tf.Tensor) else None
        return None if found is None else found.spread

    def shown(self, spread: Spread, name: str) -> tf.Tensor:
        """Return a tensor that stands for the whole array.

        Args:
            spread: the array.
            name: name of the layer that has made it.
        """
        team, replica = self._team, replica_id()

        @tf.custom_gradient
        def standing_in(part: tf.Tensor) -> Any:
            def backward(gradient: Any) -> tf.Tensor:
                x, label = tf.convert_to_tensor(gradient), f"gradient of {_label(name)}"
                rank = team.rank(replica)
                return summed_slice(by_team(team), x, spread, team.size, rank, label)

            return _without_numbers(dataclasses.replace(spread, part=part)), backward

        tensor = standing_in(spread.part)
        self._shown[tensor.ref()] = _Shown(tensor, spread, replica, name)
        return tensor

    def gather_used(self) -> dict[str, list[str]]:
        """Gather the arrays that are used whole.

        Returns:
            For the name of each layer whose output is gathered, the names of what uses it.
        """
        used: dict[str, list[str]] = {}
        for each in self._shown.values():
            consumers = each.tensor.consumers()
            if consumers:
                self._gather(each)
                used.setdefault(each.name, []).extend(op.name for op in consumers)
        return used

    def _gather(self, shown: _Shown) -> None:
        team, replica = self._team, shown.replica
        communicator, made = team.communicators[replica], shown.tensor.op
        with shown.tensor.graph.as_default(), tf.device(communicator.device):
            exchange, label = by_replica(team, replica), _label(shown.name)
            gathered = whole(exchange, shown.spread, team.size, communicator.rank, label)
            replace_input(made, shown.tensor.value_index, gathered)


def _label(name: str) -> str:
    return f"whole output of {name}"


def _without_numbers(spread: Spread) -> tf.Tensor:
    """Return a tensor of the shape of the whole array, whose numbers are NaN."""
    nothing = spread.part * tf.constant(float("nan"), spread.part.dtype)
    return tf.gather(nothing, tf.zeros([spread.size], tf.int32), axis=spread.axis)
