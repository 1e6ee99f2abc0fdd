"""Bytes of weights, gradients and optimizer state per rank: ZeRO (Rajbhandari et al., 2020)."""

from __future__ import annotations

import dataclasses

from tfscale.support import arguments

SHARDS = ("none", "state", "gradients", "all")  # ZeRO-0 to ZeRO-3


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Bytes that one parameter takes.

    Args:
        weights: bytes of the weight.
        gradients: bytes of its gradient.
        state: bytes that the optimizer keeps.
    """

    weights: float = 4
    gradients: float = 4
    state: float = 8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            what = "a number of bytes per parameter"
            arguments.real(getattr(self, field.name), field.name, 0, what=what)

    @property
    def total(self) -> float:
        """Bytes of one parameter without shards."""
        return self.weights + self.gradients + self.state

    def each(self) -> dict[str, Numbers]:
        """Return numbers of each kind alone, by name."""
        return {
            "weights": Numbers(self.weights, 0, 0),
            "gradients": Numbers(0, self.gradients, 0),
            "state": Numbers(0, 0, self.state),
        }


ADAM = Numbers()  # float32, two slots
MIXED_ADAM = Numbers(2, 2, 12)  # float16, with float32 copies of weights, as in the paper


def bytes_per_rank(
    parameters: float, ranks: int, shard: str = "none", numbers: Numbers = ADAM
) -> float:
    """Return the bytes of weights, gradients and state on each rank.

    Args:
        parameters: number of parameters.
        ranks: number of ranks that share the shards.
        shard: what is cut into shards: ``"none"``; ``"state"`` (ZeRO-1); ``"gradients"``, which
            means state and gradients (ZeRO-2); ``"all"``, weights too (ZeRO-3).
        numbers: bytes of one parameter.

    Example:
        >>> [round(bytes_per_rank(7.5e9, 64, shard, MIXED_ADAM) / 1e9, 2) for shard in SHARDS]
        [120.0, 31.41, 16.64, 1.88]
    """
    arguments.whole(ranks, "ranks", 1)
    depth = SHARDS.index(arguments.choice(shard, "shard", SHARDS))
    weights = numbers.weights / (ranks if depth > 2 else 1)
    gradients = numbers.gradients / (ranks if depth > 1 else 1)
    state = numbers.state / (ranks if depth > 0 else 1)
    return parameters * (weights + gradients + state)


def offload_efficiency(intensity: float, bandwidth: float, rate: float) -> float:
    """Return the share of a device's rate that remains if data is read from slower memory.

    ZeRO-Infinity (Rajbhandari et al., 2021), section 4: ``ait * bw / (ait * bw + peak)``.

    Args:
        intensity: floating-point operations per byte that is read.
        bandwidth: bytes per second from the slower memory.
        rate: operations per second of the device.

    Example:
        >>> round(offload_efficiency(intensity=1024, bandwidth=70e9, rate=70e12), 3)
        0.506
    """
    reached = intensity * bandwidth
    return reached / (reached + rate)
