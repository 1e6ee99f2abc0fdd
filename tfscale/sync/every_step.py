"""Synchronous training: replicas agree after every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfscale.sync.rule import Rule


@dataclasses.dataclass(frozen=True, repr=False)
class EveryStep(Rule):
    """Synchronous training: every step sums gradients over replicas, and equals one device's.

    Example:
        >>> strategy = tfscale.ScaleStrategy(sync=tfscale.sync.EveryStep())  # the default
    """

    every = 1
    sums_gradients = True

    def team_size(self, devices: int, hosts: Sequence[str]) -> int:
        """Return the number of all replicas."""
        return devices * len(hosts)
