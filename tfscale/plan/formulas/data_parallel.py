"""Speed-up of data parallelism on paper: FireCaffe (2016) with the constants of Paleo (2017)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from tfscale.collectives import Link, central, ring

Sum = Callable[[int, float, Link], float]


@dataclasses.dataclass(frozen=True)
class Training:
    """A model and the device that trains it.

    Args:
        parameters: number of parameters, 4 bytes each.
        forward_flops: operations of one sample's forward pass; the backward pass takes twice as
            many.
        rate: operations per second that a device reaches.
    """

    parameters: float
    forward_flops: float
    rate: float

    def compute_seconds(self, samples: float) -> float:
        """Return the time of a step's passes on one device."""
        return 3 * self.forward_flops * samples / self.rate


def reduction_tree(ranks: int, nbytes: float, link: Link) -> float:
    """Return the time of FireCaffe's tree: up and down, with the whole buffer on each level.

    The trees of ``tfscale.collectives`` are faster, because they send the buffer in pieces.
    """
    return 2 * math.log2(ranks) * link.seconds(nbytes)


def parameter_server(ranks: int, nbytes: float, link: Link) -> float:
    """Return the time of a server whose port carries all gradients, and then all weights."""
    return _cost(central, ranks, nbytes, link)


def ring_all_reduce(ranks: int, nbytes: float, link: Link) -> float:
    """Return the time of a ring."""
    return _cost(ring, ranks, nbytes, link)


def _cost(algorithm: Callable[..., object], ranks: int, nbytes: float, link: Link) -> float:
    cost = algorithm(ranks).cost  # type: ignore[attr-defined]
    return float(cost.time(nbytes, link))


def speed_up(training: Training, ranks: int, batch: int, link: Link, sums: Sum) -> float:
    """Return how much faster a step is on ``ranks`` devices than on one device.

    Computation and communication do not overlap. More ranks than samples do not help: the limit
    of data parallelism is one sample per rank.

    Example:
        >>> nin = Training(7.59e6, 1.94e9, rate=0.21 * 3935e9)
        >>> link = Link(alpha=0, beta=8 / (0.56 * 70e9))
        >>> round(speed_up(nin, 32, 256, link, reduction_tree), 1)
        15.2
    """
    used = min(ranks, batch)
    compute = training.compute_seconds(math.ceil(batch / used))
    return training.compute_seconds(batch) / (compute + sums(used, 4 * training.parameters, link))
