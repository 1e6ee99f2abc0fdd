"""Type of a strategy, as the files that it is made of use it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from tfscale.exchange.reducer import Reducer


class Strategy(Protocol):
    """A ``ScaleStrategy``.

    Attributes:
        extended: the implementation that TensorFlow calls: ``Extended`` of extended.py.
        sync: the rule by which replicas agree.
        own_losses: the user's argument ``own_losses``.
        synchronizes_batch_norm: whether batch normalization uses statistics of the global batch.
        optimizers: optimizers that have been made in the strategy's scope.
        reducer: sums gradients.
        move_reducer: sums gradients by which a step moves weights before it computes others.
        curvature_reducer: sums measured curvature.
        sharding: optimizers whose state is in parts, a ``Sharding`` of shards/sharding.py; None if
            each replica holds it all.
        teams: teams along the axes of a grid, of grid/teams.py; None without a grid.
        parts: what replicas hold of weights: ``Copies`` of grid/parts.py, or a subclass.
        kept: variables in which steps keep sums of gradients: ``GradientVariables`` of changed.py.
        rounds: rounds of all models, ``Rounds`` of rounds/rounds.py; None if replicas agree after
            every step.
        meets: whether workers compare their steps in the ``fit`` that runs.
        balance: changes the shares of the batch, ``Balance`` of batch/balance.py; None if they are
            fixed, or equal.
    """

    extended: Any
    sync: Any
    own_losses: str | None
    synchronizes_batch_norm: bool
    optimizers: Any
    reducer: Reducer
    move_reducer: Reducer
    curvature_reducer: Reducer
    sharding: Any
    teams: Any
    parts: Any
    kept: Any
    rounds: Any
    balance: Any
    meets: bool

    @property
    def reducers(self) -> Iterable[Reducer]:
        """All reducers."""
        ...

    def scope(self) -> Any:
        """Return the context in which models and optimizers are made."""
        ...

    def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas, joined along an axis."""
        ...
