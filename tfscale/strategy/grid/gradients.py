"""Gradients of a grid: sums, norms and checks of split weights and of weights with copies.

Replicas of a model team read the same rows, and each differentiates an equal part of their loss. So
the gradient of a copy is a part of a sum over all replicas. The gradient of a slice is whole within
its team: it is a part of a sum over the replicas that hold the same slice, its *twins*. Twins also
share out the optimizer's state, if ``shard="optimizer"`` asks for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import innermost, path_of
from tfscale.bridge.optimizers import is_elementwise, works_on_slices
from tfscale.bridge.protocols import Optimizer, Variable
from tfscale.exchange.rows import numbers_of, sum_as_one_device, sum_equal_rows
from tfscale.exchange.team import Team
from tfscale.parallel.layout import Layout
from tfscale.strategy.grid.shares import NAME, Shares, is_rows
from tfscale.strategy.grid.teams import Twins
from tfscale.strategy.grid.weights import is_split
from tfscale.strategy.sharded_clipping import (
    clipped_by_squares,
    finite_on_all,
    summed_numbers,
)
from tfscale.strategy.step import during, this_step

_NEEDS_WHOLE = (
    "{optimizer} may need all numbers of a weight, and each replica holds and updates a part "
    "of {path}. Take an optimizer that updates each number by itself, such as AdamW, or leave the "
    "weight whole"
)
_CONSTRAINED = (
    "the constraint {constraint} of {path} may need all numbers of the weight, and each replica "
    "holds and updates a part of it. Leave out the constraint, or leave the weight whole"
)


class GridGradients:
    """Sums, norms and checks of the gradients of a step.

    Args:
        slices: team of the replicas that hold the slices of one weight; None if none is cut.
        twins: replicas that hold the same slices.
        everybody: team of all replicas.
    """

    def __init__(self, slices: Team | None, twins: Twins, everybody: Team) -> None:
        self._slices, self._twins, self._everybody = slices, twins, everybody

    def twins_of(self, variable: Variable) -> Twins | None:
        """Return the replicas that hold the same part of a weight; None if all hold copies."""
        return self._twins if is_split(variable) else None

    def is_part(self, variable: Variable) -> bool:
        """Return whether replicas hold parts of a weight."""
        return self.twins_of(variable) is not None

    def refuse(self, optimizer: Optimizer, variables: Sequence[Variable]) -> None:
        """Raise if an optimizer or a constraint needs whole weights that are cut."""
        for variable in filter(is_split, variables):
            if not is_elementwise(innermost(optimizer)):
                name = type(innermost(optimizer)).__name__
                raise ValueError(_NEEDS_WHOLE.format(optimizer=name, path=path_of(variable)))
            constraint = getattr(variable, "constraint", None)
            if constraint is not None and not works_on_slices(constraint):
                raise ValueError(
                    _CONSTRAINED.format(
                        constraint=type(constraint).__name__, path=path_of(variable)
                    )
                )

    def sum_slices(self, grads: list[Any], variables: Sequence[Variable]) -> list[Any]:
        """Return the gradients, of which those of parts are summed; None stays None."""
        found = list(grads)
        for twins, places in self._by_twins(grads, variables).items():
            team, own = twins.team, [grads[i] for i in places]
            if team is not None:
                own = team.together(functools.partial(_sums, team), own)
            for i, total in zip(places, own, strict=True):
                found[i] = total
        return found

    def _by_twins(
        self, values: Sequence[Any], variables: Sequence[Variable]
    ) -> dict[Twins, list[int]]:
        """Return the places of values that belong to parts of weights, by who holds the same."""
        found: dict[Twins, list[int]] = {}
        for place, (value, variable) in enumerate(zip(values, variables, strict=True)):
            twins = None if value is None else self.twins_of(variable)
            if twins is not None:
                found.setdefault(twins, []).append(place)
        return found

    def scatter_sums(
        self,
        grads: Sequence[Any],
        variables: Sequence[Variable],
        layouts: Sequence[Layout],
        rank: int,
    ) -> list[Any]:
        """Return a rank's shares of the sums of parts' gradients; None for all others.

        Args:
            grads: gradients of this replica.
            variables: variables of the gradients.
            layouts: who holds what: of parts, ``SharedOut`` among those who hold the same part.
            rank: rank of this replica.
        """
        found: list[Any] = [None] * len(grads)
        for twins, places in self._by_twins(grads, variables).items():
            shares = Shares(twins.team, [layouts[i] for i in places], rank)
            for i, share in zip(places, shares.scatter([grads[i] for i in places]), strict=True):
                found[i] = share
        return found

    def join_shares(
        self,
        shares: Sequence[tf.Tensor],
        variables: Sequence[Variable],
        layouts: Sequence[Layout],
        rank: int,
    ) -> list[Any]:
        """Return a rank's parts from the shares of all who hold the same; None for copies."""
        found: list[Any] = [None] * len(shares)
        for twins, places in self._by_twins(shares, variables).items():
            joint = Shares(twins.team, [layouts[i] for i in places], rank)
            for i, part in zip(places, joint.join([shares[i] for i in places]), strict=True):
                found[i] = part
        return found

    def sum_rows_of_copies(self, grads: list[Any], variables: Sequence[Variable]) -> list[Any]:
        """Return the gradients, in which one replica of each team holds the rows of whole tables.

        The replicas of a team look the same rows up, and each has a part of their gradient. Joined,
        they would be several small rows, which some optimizers treat differently from one.
        """

        team = self._slices
        pairs = enumerate(zip(grads, variables, strict=True))
        places = [i for i, (g, v) in pairs if is_rows(g) and not is_split(v)]
        if team is None or not places:
            return grads

        def sums(team: Team, replica: int, own: list[Any]) -> list[Any]:
            totals = [sum_equal_rows(team, replica, rows, NAME) for rows in own]
            if team.rank(replica) == 0:
                return totals
            zeros = [tf.zeros_like(rows.values) for rows in totals]
            return [
                tf.IndexedSlices(none, rows.indices, rows.dense_shape)
                for none, rows in zip(zeros, totals, strict=True)
            ]

        found = list(grads)
        every = team.together(functools.partial(sums, team), [grads[i] for i in places])
        for i, total in zip(places, every, strict=True):
            found[i] = total
        return found

    def of_copies(self, grads: Sequence[Any], variables: Sequence[Variable]) -> list[Any]:
        """Return the gradients of weights with copies; None stands for those of slices."""
        return [None if self.is_part(v) else g for g, v in zip(grads, variables, strict=True)]

    def leaving_slices(self, reduce: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Return ``reduce`` for gradients of which those of slices are sums already."""

        def reduced(grads: list[Any], variables: Sequence[Variable], **more: Any) -> list[Any]:
            sums = reduce(self.of_copies(grads, variables), variables, **more)
            return [own if total is None else total for own, total in zip(grads, sums, strict=True)]

        return reduced

    def clipped(
        self,
        variables: Sequence[Variable],
        clip: Callable[..., list[Any]],
        optimizer: Any,
        grads: Sequence[Any],
    ) -> list[Any]:
        """Return clipped gradients; norms are those of whole gradients.

        Args:
            variables: variables of the gradients.
            clip: the optimizer's own method, for what one gradient is enough for.
            optimizer: the optimizer.
            grads: gradients, which a window has accumulated if there is a window.
        """
        step = this_step()
        summed = list(grads) if step.window is None else step.window(list(grads))
        if not (optimizer.clipnorm or optimizer.global_clipnorm):
            with during(step.as_reduced()):
                return clip(optimizer, summed)
        own = [tf.reduce_sum(tf.square(numbers_of(g))) for g in summed]
        return clipped_by_squares(optimizer, summed, self.squares(optimizer, variables, own))

    def squares(
        self, optimizer: Any, variables: Sequence[Variable], own: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return sums of the squares of whole gradients.

        Args:
            optimizer: the optimizer, which clips.
            variables: variables of the gradients.
            own: sums of the squares of what this replica holds of the gradients.
        """
        cut = [i for i, v in enumerate(variables) if is_split(v)]
        if cut:
            assert self._slices is not None
            totals = summed_numbers(self._slices, [own[i] for i in cut], "squares of norms")
            for i, total in zip(cut, totals, strict=True):
                own[i] = total
        return own

    def finite(self, check: Callable[..., Any], optimizer: Any, grads: Sequence[Any]) -> tf.Tensor:
        """Return whether the gradients of all replicas are finite."""
        return finite_on_all(self._everybody, check, optimizer, grads)


def _sums(team: Team, replica: int, values: Sequence[Any]) -> list[Any]:
    dense = iter(team.sum_all(replica, [x for x in values if not is_rows(x)], NAME))
    return [
        sum_as_one_device(team, replica, x, NAME) if is_rows(x) else next(dense) for x in values
    ]
