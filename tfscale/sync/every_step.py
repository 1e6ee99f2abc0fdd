"""Replicas agree after every step."""

from __future__ import annotations

import dataclasses

from tfscale.sync.rule import Rule


@dataclasses.dataclass(frozen=True, repr=False)
class EveryStep(Rule):
    """Gradients are summed over replicas in every step, which so is that of one device.

    Example:
        >>> strategy = tfscale.ScaleStrategy(sync=tfscale.sync.EveryStep())  # as without sync
    """
