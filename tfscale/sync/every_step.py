"""Synchronous training: replicas agree after every step."""

from __future__ import annotations

import dataclasses

from tfscale.sync.rule import Rule


@dataclasses.dataclass(frozen=True, repr=False)
class EveryStep(Rule):
    """Synchronous training: every step sums gradients over replicas, and equals one device's.

    Example:
        >>> strategy = tfscale.ScaleStrategy(sync=tfscale.sync.EveryStep())  # the default
    """
