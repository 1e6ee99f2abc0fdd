"""Interface of a ``ScaleStrategy`` for the rooms below it, which cannot import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.exchange.reducer import Reducer


class Scaling:
    """A strategy that gives each replica a weight by its rows, and sums gradients by reducers.

    Attributes:
        reducer: reducer of gradients.
        meets: whether all workers compare their steps in the ``fit`` that runs, since each has
            the callback ``Telemetry``.
    """

    reducer: Reducer
    meets: bool = False

    @property
    def reducers(self) -> list[Reducer]:
        """Reducers of gradients, moves and measured curvature, and of weights, if they are sent."""
        raise NotImplementedError

    def part_of_mean(self, compute: Callable[[], Any]) -> Any:
        """Return a replica's mean loss over its rows as its part of the global batch's loss."""
        raise NotImplementedError

    def before_and_all(self, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return counts of the rows before a replica's in the global batch, and of all rows."""
        raise NotImplementedError

    def figures_of_rounds(self) -> dict[str, Any]:
        """Return figures of the rounds, by name; none if replicas agree after every step."""
        raise NotImplementedError

    def shares_of_batch(self) -> list[float] | None:
        """Return which part of a batch's rows each replica takes; None if all parts are equal."""
        raise NotImplementedError

    def gathered_from_workers(self, numbers: np.ndarray) -> np.ndarray:
        """Return the arrays of all workers, which are of one shape; all workers call this."""
        raise NotImplementedError

    def seconds_behind(self) -> float:
        """Return how long this process has waited for sums in the background, in seconds."""
        raise NotImplementedError


def scaling(strategy: tf.distribute.Strategy) -> Scaling | None:
    """Return a strategy that is tfscale's own; None for any other strategy."""
    return strategy if isinstance(strategy, Scaling) else None
