"""Gradients of a grid: sums, norms and checks of split weights and of weights with copies.

Replicas of a model team read the same rows, and each differentiates an equal part of their loss. So
the gradient of a copy is a part of a sum over all replicas. The gradient of a slice is whole within
its team: it is a part of a sum over the replicas that hold the same slice, its *twins*. Twins also
share out the optimizer's state, if ``shard="optimizer"`` asks for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.objects import innermost, path_of
from tfscale.bridge.optimizers import is_elementwise, works_on_slices
from tfscale.bridge.protocols import Optimizer, Variable
from tfscale.exchange.rows import (
    is_rows,
    numbers_of,
    sum_all,
    sum_as_one_device,
    sum_equal_rows,
    with_numbers,
)
from tfscale.exchange.team import Team
from tfscale.parallel.layout import Layout
from tfscale.strategy.grid.shares import NAME, Shares
from tfscale.strategy.grid.weights import is_split
from tfscale.strategy.shards.sharded_clipping import (
    clipped_by_squares,
    finite_on_all,
    summed_numbers,
)
from tfscale.strategy.step import during, this_step
from tfscale.strategy.teams import Teams

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

    Without twins, all replicas hold copies, and their gradients need nothing beside the sum over
    replicas.

    Args:
        slices: team of the replicas that hold the slices of one weight; None if none is cut.
        twins: replicas that hold the same parts; None if no weight is in parts.
        everybody: team of all replicas; needed with twins.
    """

    def __init__(
        self,
        slices: Team | None = None,
        twins: Teams | None = None,
        everybody: Team | None = None,
    ) -> None:
        self._slices, self._twins, self._everybody = slices, twins, everybody

    @property
    def are_of_one_model(self) -> bool:
        """Whether the replicas that hold parts of one model are all replicas."""
        return self._twins is not None and self._twins.team is None

    def twins_of(self, variable: Variable) -> Teams | None:
        """Return the replicas that hold the same part of a weight; None if all hold copies."""
        return self._twins if is_split(variable) else None

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

        def summed(twins: Teams, places: Sequence[int]) -> list[Any]:
            own = [grads[i] for i in places]
            return own if twins.team is None else _together(twins.team, _sums, own)

        return _replaced(grads, self._by_twins(grads, variables, summed))

    def _by_twins(
        self,
        values: Sequence[Any],
        variables: Sequence[Variable],
        run: Callable[[Teams, Sequence[int]], Sequence[Any]],
    ) -> dict[int, Any]:
        """Return what ``run`` makes of the values of parts, for those who hold the same; by place.

        Args:
            values: values of this replica; None counts as none.
            variables: variables of the values.
            run: gets twins, and the places of the values of their parts.
        """
        of_twins: dict[Teams, list[int]] = {}
        for place, (value, variable) in enumerate(zip(values, variables, strict=True)):
            twins = None if value is None else self.twins_of(variable)
            if twins is not None:
                of_twins.setdefault(twins, []).append(place)
        found: dict[int, Any] = {}
        for twins, places in of_twins.items():
            found |= dict(zip(places, run(twins, places), strict=True))
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

        def scattered(twins: Teams, places: Sequence[int]) -> list[Any]:
            shares = Shares(twins.team, [layouts[i] for i in places], rank)
            return shares.scatter([grads[i] for i in places])

        return _replaced([None] * len(grads), self._by_twins(grads, variables, scattered))

    def join_shares(
        self,
        shares: Sequence[tf.Tensor],
        variables: Sequence[Variable],
        layouts: Sequence[Layout],
        rank: int,
    ) -> list[Any]:
        """Return a rank's parts from the shares of all who hold the same; None for copies."""

        def joined(twins: Teams, places: Sequence[int]) -> list[Any]:
            joint = Shares(twins.team, [layouts[i] for i in places], rank)
            return joint.join([shares[i] for i in places])

        return _replaced([None] * len(shares), self._by_twins(shares, variables, joined))

    def sum_rows_of_copies(self, grads: list[Any], variables: Sequence[Variable]) -> list[Any]:
        """Return the gradients, in which one replica of each team holds the rows of whole tables.

        The replicas of a team look the same rows up, and each has a part of their gradient. Joined,
        they would be several small rows, which some optimizers treat differently from one.
        """
        pairs = enumerate(zip(grads, variables, strict=True))
        places = [i for i, (g, v) in pairs if is_rows(g) and not is_split(v)]
        if self._slices is None or not places:
            return grads
        sums = _together(self._slices, _rows_of_first, [grads[i] for i in places])
        return _replaced(grads, dict(zip(places, sums, strict=True)))

    def of_copies(self, grads: Sequence[Any], variables: Sequence[Variable]) -> list[Any]:
        """Return the gradients of weights with copies; None stands for those of slices."""
        every = zip(grads, variables, strict=True)
        return [g if self.twins_of(v) is None else None for g, v in every]

    def leaving_slices(self, reduce: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Return ``reduce`` for gradients of which those of slices are sums already."""
        if self._twins is None:
            return reduce

        def reduced(grads: list[Any], variables: Sequence[Variable], **more: Any) -> list[Any]:
            sums = reduce(self.of_copies(grads, variables), variables, **more)
            return [own if total is None else total for own, total in zip(grads, sums, strict=True)]

        return reduced

    @contextlib.contextmanager
    def updating(self, optimizer: Optimizer, variables: Sequence[Variable]) -> Iterator[None]:
        """Let an optimizer clip and check whole gradients, on this replica.

        Args:
            optimizer: the optimizer.
            variables: variables that it gets gradients of.
        """
        if self._twins is None:
            yield
            return
        inner = innermost(optimizer)
        clipped = functools.partial(self.clipped, variables)
        with contextlib.ExitStack() as stack:
            stack.enter_context(hooks.CLIP_GRADIENTS.on(inner, clipped, in_thread=True))
            if optimizer is not inner:
                stack.enter_context(hooks.CHECK_FINITE.on(optimizer, self.finite, in_thread=True))
            yield

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
        if not cut:
            return own
        assert self._slices is not None
        totals = summed_numbers(self._slices, [own[i] for i in cut], "squares of norms")
        return _replaced(own, dict(zip(cut, totals, strict=True)))

    def finite(self, check: Callable[..., Any], optimizer: Any, grads: Sequence[Any]) -> tf.Tensor:
        """Return whether the gradients of all replicas are finite."""
        assert self._everybody is not None
        return finite_on_all(self._everybody, check, optimizer, grads)


def _replaced(values: Sequence[Any], others: Mapping[int, Any]) -> list[Any]:
    """Return values, with others at some places."""
    return [others.get(place, value) for place, value in enumerate(values)]


def _together(
    team: Team, run: Callable[[Team, int, list[Any]], list[Any]], own: list[Any]
) -> list[Any]:
    return team.together(functools.partial(run, team), own)


def _rows_of_first(team: Team, replica: int, every: Sequence[Any]) -> list[Any]:
    """Return sums of equal rows on the first replica of a team, and rows of zeros on the others."""
    totals = [sum_equal_rows(team, replica, rows, NAME) for rows in every]
    if team.rank(replica) == 0:
        return totals
    return [with_numbers(rows, tf.zeros_like) for rows in totals]


def _sums(team: Team, replica: int, values: Sequence[Any]) -> list[Any]:
    return sum_all(team, replica, values, NAME, sum_as_one_device)
