"""Parts of weights of which those who hold the same share out the sums and the updates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from tfscale.exchange.rows import is_rows, sum_as_one_device
from tfscale.exchange.team import Team
from tfscale.parallel.layout import Layout, SharedOut
from tfscale.parallel.matrix import Matrix
from tfscale.parallel.rows import part_of_rows

NAME = "gradients of slices"
_UPDATED = "updated slices"


class Shares:
    """Shares of one rank of some parts of weights.

    Args:
        team: team of the replicas that hold the same parts; None if there is one.
        layouts: who holds what of the weights.
        rank: rank of this replica among all.
    """

    def __init__(self, team: Team | None, layouts: Sequence[Layout], rank: int) -> None:
        self._team = team
        among = [cast(SharedOut, layout).among(rank) for layout in layouts]
        self._inners = [inner for inner, _ in among]
        self._own = among[0][1]

    def scatter(self, grads: Sequence[Any]) -> list[Any]:
        """Return this replica's shares of the team's sums of gradients, dense or of rows."""
        dense = [i for i, g in enumerate(grads) if not is_rows(g)]

        def share(matrix: Matrix, replica: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            rows = matrix.of_wholes(tensors)
            if self._team is not None and matrix.columns:
                rows = self._team.scatter(replica, rows, NAME)
            return matrix.parts(rows, self._own)

        # TensorFlow does not always know the shape of a gradient.
        own = [tf.reshape(grads[i], self._inners[i].shape) for i in dense]
        found = dict(zip(dense, self._by_type(share, own, dense), strict=True))
        for i, (gradient, inner) in enumerate(zip(grads, self._inners, strict=True)):
            if is_rows(gradient):
                found[i] = part_of_rows(self._summed(gradient), inner, self._own)
        return [found[i] for i in range(len(grads))]

    def join(self, shares: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the parts that this team holds, from the shares of all its replicas."""

        def whole(matrix: Matrix, replica: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            row = matrix.row(tensors)
            if self._team is not None and matrix.columns:
                row = self._team.gather(replica, row, _UPDATED)
            else:
                row = tf.repeat(row, matrix.ranks, 0)
            return matrix.wholes(row)

        return self._by_type(whole, shares, range(len(shares)))

    def _by_type(
        self,
        run: Callable[[Matrix, int, list[tf.Tensor]], list[tf.Tensor]],
        tensors: Sequence[tf.Tensor],
        places: Sequence[int],
    ) -> list[tf.Tensor]:
        """Return what ``run`` makes of the tensors of each type."""
        found: dict[int, tf.Tensor] = {}
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            members = [i for i, x in enumerate(tensors) if x.dtype == dtype]
            matrix = Matrix(tuple(self._inners[places[i]] for i in members))
            own = self._together(functools.partial(run, matrix), [tensors[i] for i in members])
            found |= dict(zip(members, own, strict=True))
        return [found[i] for i in range(len(tensors))]

    def _together(
        self, run: Callable[[int, list[tf.Tensor]], list[tf.Tensor]], own: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        return run(0, own) if self._team is None else self._team.together(run, own)

    def _summed(self, rows: tf.IndexedSlices) -> tf.IndexedSlices:
        team = self._team
        if team is None:
            return rows
        return team.together_on_one(
            lambda replica, own: sum_as_one_device(team, replica, own, NAME), rows
        )
