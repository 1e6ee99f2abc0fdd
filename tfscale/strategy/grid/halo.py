r"""Arrays that the replicas of a team hold in slices along an axis, and the exchange of halos.

An exchange gives each replica the indices of the axis that it needs. Let :math:`S_{qr}` be the
selection of the indices that rank q has and rank r needs. Then rank r gets

.. math:: y_r = \sum_q S_{qr} x_q,

and the adjoint brings gradients back to those who hold the indices, where they are added:

.. math:: \bar{x}_q = \sum_r S_{qr}^T \bar{y}_r.

A whole array is the case in which each rank needs all indices. All of it is one all-to-all of
unequal sizes, in which no number is sent that its target does not need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.exchange.team import Team
from tfscale.parallel.windows import Moves, slices
from tfscale.strategy.grid.collectives import exchanged

# Returns the numbers that all replicas have for this one, from those for each of them, the numbers
# of numbers to each and from each, and a name.
Exchange = Callable[[tf.Tensor, tf.Tensor, tf.Tensor, str], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Spread:
    """Array that a team holds in slices along an axis, on one replica of the team.

    Args:
        part: the replica's slice.
        axis: the axis that is cut.
        size: size of the whole array along that axis.
    """

    part: tf.Tensor
    axis: int
    size: int

    @property
    def shape(self) -> list[int | None]:
        """Shape of the whole array, as far as the graph knows it."""
        return [*self.part.shape[: self.axis], self.size, *self.part.shape[self.axis + 1 :]]


def by_team(team: Team) -> Exchange:
    """Return the exchange of a team whose replicas call it; gradients go back."""

    def exchange(x: tf.Tensor, sizes: tf.Tensor, received: tf.Tensor, name: str) -> tf.Tensor:
        return exchanged(team, x, sizes, received, name)

    return exchange


def by_replica(team: Team, replica: int) -> Exchange:
    """Return the exchange of a replica, for code that runs outside of it; without a gradient."""

    def exchange(x: tf.Tensor, sizes: tf.Tensor, received: tf.Tensor, name: str) -> tf.Tensor:
        rows, _ = team.all_to_all(replica, x, name, sizes=sizes, received=received)
        return rows

    return exchange


def pieces(
    exchange: Exchange, moves: Moves, rank: int, spread: Spread, name: str
) -> list[tf.Tensor]:
    """Return what this rank needs, in slices that follow each other along the axis.

    All ranks of the team take part, also with nothing to send or to get: a rank that did not would
    have no gradient to send, either.
    """
    part, axis, own = spread.part, spread.axis, moves.have[rank]
    kept = part_of(part, axis, moves.kept(rank), own.start)
    if not moves.number:
        return [kept]
    sent = [part_of(part, axis, each, own.start) for each in moves.sent(rank)]
    came = _came(exchange, sent, moves.sent(rank), moves.received(rank), axis, name)
    came[rank] = kept
    return came


def whole(exchange: Exchange, spread: Spread, ranks: int, rank: int, name: str) -> tf.Tensor:
    """Return the whole array of which each rank has a slice."""
    moves = Moves.of_all(spread.size, ranks)
    return tf.concat(pieces(exchange, moves, rank, spread, name), spread.axis)


def summed_slice(
    exchange: Exchange, x: tf.Tensor, spread: Spread, ranks: int, rank: int, name: str
) -> tf.Tensor:
    """Return this rank's slice of the sum of all ranks' arrays: the adjoint of ``whole``.

    Args:
        exchange: the exchange.
        x: this rank's array.
        spread: the array whose ``whole`` has the gradient ``x``.
        ranks: number of ranks of the team.
        rank: this rank.
        name: name of the exchange.
    """
    axis, own = spread.axis, slices(spread.size, ranks)
    sent = [range(0) if other == rank else each for other, each in enumerate(own)]
    received = [range(0) if other == rank else own[rank] for other in range(ranks)]
    cut = [part_of(x, axis, each) for each in sent]
    came = _came(exchange, cut, sent, received, axis, name)
    came[rank] = part_of(x, axis, own[rank])
    return tf.add_n(came)


def part_of(x: tf.Tensor, axis: int, own: range, first: int = 0) -> tf.Tensor:
    """Return indices of an axis of an array whose first index along the axis is ``first``."""
    if x.shape[axis] == len(own):
        return x
    begin, size = [0] * x.shape.rank, [-1] * x.shape.rank
    begin[axis], size[axis] = own.start - first if own else 0, len(own)
    return tf.slice(x, begin, size)


def _came(
    exchange: Exchange,
    sent: Sequence[tf.Tensor],
    to: Sequence[range],
    received: Sequence[range],
    axis: int,
    name: str,
) -> list[tf.Tensor]:
    """Return the slices that all ranks have for this one.

    Args:
        exchange: the exchange.
        sent: a slice for each rank.
        to: the indices of these slices.
        received: the indices of the slices that come from each rank.
        axis: the axis.
        name: name of the exchange.
    """
    shape = _sizes(sent[0])
    one = tf.cast(tf.reduce_prod([n for i, n in enumerate(shape) if i != axis]), tf.int64)

    def counts(indices: Sequence[range]) -> tf.Tensor:
        return one * tf.constant([len(each) for each in indices], tf.int64)

    # A slice without indices would only give the backward pass more to add.
    some = [x for x, indices in zip(sent, to, strict=True) if indices] or sent[:1]
    flat, numbers = tf.concat([tf.reshape(each, [-1]) for each in some], 0), counts(received)
    came = tf.split(exchange(flat, counts(to), numbers, name), numbers, num=len(received))

    def shaped(x: tf.Tensor, indices: range) -> tf.Tensor:
        return tf.reshape(x, [*shape[:axis], len(indices), *shape[axis + 1 :]])

    return [shaped(x, indices) for x, indices in zip(came, received, strict=True)]


def _sizes(x: tf.Tensor) -> list[Any]:
    """Return the shape of an array, with numbers where the graph knows them."""
    dynamic = tf.shape(x)
    return [dynamic[i] if size is None else size for i, size in enumerate(x.shape)]
