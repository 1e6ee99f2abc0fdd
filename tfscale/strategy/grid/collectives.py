"""Sums and gathers within a team of a grid, in the forward pass, with their true adjoints.

Each replica of a team differentiates its own loss. The gradients are right because the collectives
carry the gradients of all losses: the adjoint of a sum over replicas is the sum of their gradients,
and the adjoint of a gather is the sum of the gradients of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfscale.exchange.rows import sum_as_one_device, sum_equal_rows
from tfscale.exchange.team import Team
from tfscale.parallel.layout import Flat, Layout, Split
from tfscale.parallel.rows import part_of_total


class Cut(Protocol):
    """A way to cut an array into equal parts, one for each rank of a team."""

    def whole(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the array from the parts of all ranks."""

    def part(self, whole: tf.Tensor, rank: int) -> tf.Tensor:
        """Return a rank's part of the array."""


class Along:
    """Equal parts along one axis of an array whose shape is known only when the step runs."""

    def __init__(self, axis: int, ranks: int) -> None:
        self._axis, self._ranks = axis, ranks

    def whole(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """See ``Cut``."""
        return tf.concat(parts, self._axis)

    def part(self, whole: tf.Tensor, rank: int) -> tf.Tensor:
        """See ``Cut``."""
        return tf.split(whole, self._ranks, self._axis)[rank]


def summed(team: Team, x: tf.Tensor, name: str) -> tf.Tensor:
    """Return the sum over a team of each replica's ``x``."""

    @tf.custom_gradient
    def forward(x: tf.Tensor) -> Any:
        total = team.together_on_one(lambda replica, own: team.sum(replica, own, name), x)
        return total, lambda of_sum: summed(team, tf.convert_to_tensor(of_sum), _backward(name))

    return _as(x, forward(x))


def whole_of(team: Team, cut: Cut, part: tf.Tensor, name: str) -> tf.Tensor:
    """Return the array of which each replica of a team has a part.

    If a layer looks rows up in the array, the gradient of the part is rows, too: some optimizers
    treat two rows differently from their sum.
    """

    @tf.custom_gradient
    def forward(part: tf.Tensor) -> Any:
        whole = joined(team, cut, part, name)
        shape = whole.shape

        def backward(of_whole: Any) -> Any:
            if isinstance(of_whole, tf.IndexedSlices) and isinstance(cut, Layout):
                return _part_of_rows(team, cut, of_whole, _backward(name))
            gradient = tf.convert_to_tensor(of_whole)
            gradient.set_shape(shape)  # gradients from a loop, such as an LSTM's, do not know it
            return part_of_sum(team, cut, gradient, _backward(name))

        return whole, backward

    return forward(part)


def joined(team: Team, cut: Cut, part: tf.Tensor, name: str) -> tf.Tensor:
    """Return the array of which each replica of a team has a part; it has no gradient."""
    rows = gathered(team, part, name)
    return cut.whole(rows if isinstance(cut, Flat) else tf.unstack(rows, team.size))


def gathered(team: Team, x: tf.Tensor, name: str) -> tf.Tensor:
    """Return the arrays of all replicas of a team, one after the other; it has no gradient."""
    return team.together_on_one(lambda replica, own: team.gather(replica, own, name), x[tf.newaxis])


def part_of_sum(team: Team, cut: Cut, whole: tf.Tensor, name: str) -> tf.Tensor:
    """Return this replica's part of the sum over a team of each replica's array."""

    @tf.custom_gradient
    def forward(whole: tf.Tensor) -> Any:
        rows = _rows_of(cut, whole, team.size)
        own = team.together_on_one(lambda replica, each: team.scatter(replica, each, name), rows)
        return own[0], lambda of_part: whole_of(
            team, cut, tf.convert_to_tensor(of_part), _backward(name)
        )

    return forward(whole)


def exchanged(
    team: Team, x: tf.Tensor, sizes: tf.Tensor, received: tf.Tensor, name: str
) -> tf.Tensor:
    """Return the rows that all replicas of a team have for this one; gradients go back.

    Args:
        team: the team.
        x: rows of this replica, first those for rank 0.
        sizes: number of rows for each rank.
        received: number of rows from each rank.
        name: name of the exchange.
    """

    @tf.custom_gradient
    def forward(x: tf.Tensor) -> Any:
        def run(replica: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            own, brought, got = tensors
            rows, _ = team.all_to_all(replica, own, name, sizes=brought, received=got)
            return [rows]

        def backward(of_rows: tf.Tensor) -> tf.Tensor:
            return exchanged(team, of_rows, received, sizes, _backward(name))

        (rows,) = team.together(run, [x, sizes, received])
        return rows, backward

    return forward(x)


def _rows_of(cut: Cut, whole: tf.Tensor, ranks: int) -> tf.Tensor:
    if isinstance(cut, Flat):
        return cut.rows(whole)  # another shape of the same memory
    return tf.stack([cut.part(whole, rank) for rank in range(ranks)])


def _part_of_rows(team: Team, layout: Layout, rows: tf.IndexedSlices, name: str) -> Any:
    # Replicas that hold slices read the same samples, and look the same rows up.
    add = sum_equal_rows if isinstance(layout, Split) else sum_as_one_device

    def part(replica: int, own: tf.IndexedSlices) -> Any:
        return part_of_total(add(team, replica, own, name), layout, team.rank(replica))

    return team.together_on_one(part, rows)


def _as(like: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    if not tf.executing_eagerly():
        x.set_shape(like.shape)
    return x


def _backward(name: str) -> str:
    return f"gradient of {name}"
