"""The cut of a chain of layers into stages with replicas: PipeDream's dynamic program (2019)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfscale.plan.profile import Chain
from tfscale.support import arguments


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a pipeline.

    Args:
        first: number of its first layer.
        last: number of the layer after its last one.
        replicas: number of devices that hold it and share its microbatches.
    """

    first: int
    last: int
    replicas: int


def stage_seconds(chain: Chain, stage: Stage, bandwidth: float) -> float:
    """Return the time per microbatch of a stage: passes and gradients' sums, over its replicas.

    The sums take ``4 (m - 1) / m`` times the bytes of the weights, as in PipeDream's optimizer.
    """
    compute = sum(chain.seconds[stage.first : stage.last])
    weights = sum(chain.parameters[stage.first : stage.last])
    m = stage.replicas
    return (compute + 4 * (m - 1) * weights / (m * bandwidth)) / m


def seconds(chain: Chain, stages: Sequence[Stage], bandwidth: float) -> float:
    """Return the time per microbatch of a full pipeline: the slowest stage or transfer.

    Each cut takes its bytes forward, and as many backward.
    """
    cuts = [2 * chain.cuts[stage.last - 1] / bandwidth for stage in stages[:-1]]
    return max([*cuts, *(stage_seconds(chain, stage, bandwidth) for stage in stages)])


def best_stages(
    chain: Chain, devices: int, bandwidth: float, replicas: Sequence[int] | None = None
) -> list[Stage]:
    """Return the fastest cut into stages and replicas that uses all devices.

    Args:
        chain: the layers.
        devices: number of equal devices.
        bandwidth: bytes per second between two devices.
        replicas: numbers of replicas of the stages, in order; by default the best ones.

    Example:
        >>> chain = Chain((1.0, 1.0, 2.0), (0.0, 0.0, 1e9), (1e3, 1e3))
        >>> best_stages(chain, devices=2, bandwidth=1e9)
        [Stage(first=0, last=2, replicas=1), Stage(first=2, last=3, replicas=1)]
    """
    arguments.whole(devices, "devices", 1)
    arguments.real(bandwidth, "bandwidth", above=0, what="a number of bytes per second")
    if replicas is not None:
        return _fixed(chain, replicas, bandwidth)
    best, came_from = _Table(chain, bandwidth).fill(devices)
    assert np.isfinite(best[devices, len(chain)])
    stages: list[Stage] = []
    last, left = len(chain), devices
    while last:
        first, used = (int(one) for one in came_from[left, last])
        stages.insert(0, Stage(first, last, used))
        last, left = first, left - used
    return stages


class _Table:
    """The dynamic program: the best time of the first layers on a number of devices."""

    def __init__(self, chain: Chain, bandwidth: float) -> None:
        self.layers = len(chain)
        total = np.concatenate([[0], np.cumsum(chain.seconds)])
        weights = np.concatenate([[0], np.cumsum(chain.parameters)])
        self.compute = total[None, :] - total[:, None]  # of the layers from row to column
        self.sums = 4 * (weights[None, :] - weights[:, None]) / bandwidth
        self.compute[np.tril_indices(self.layers + 1)] = np.inf  # stages without layers
        self.cut = np.concatenate([[0], 2 * np.array(chain.cuts) / bandwidth, [0]])

    def stage(self, replicas: int) -> Any:
        """Return the times of all stages with so many replicas."""
        return (self.compute + self.sums * ((replicas - 1) / replicas)) / replicas

    def fill(self, devices: int) -> tuple[Any, Any]:
        best = np.full((devices + 1, self.layers + 1), np.inf)
        came_from = np.zeros((devices + 1, self.layers + 1, 2), int)
        best[0, 0] = 0
        columns = np.arange(self.layers + 1)
        stages = [self.stage(used) for used in range(1, devices + 1)]
        for left in range(1, devices + 1):
            for used in range(1, left + 1):
                before = np.maximum(best[left - used], self.cut)
                times = np.maximum(before[:, None], stages[used - 1])
                first = times.argmin(axis=0)
                time = times[first, columns]
                better = time < best[left]
                best[left, better] = time[better]
                came_from[left, better, 0] = first[better]
                came_from[left, better, 1] = used
        return best, came_from


def _fixed(chain: Chain, replicas: Sequence[int], bandwidth: float) -> list[Stage]:
    """Return the best cut for given numbers of replicas."""
    table = _Table(chain, bandwidth)
    best = np.full(len(chain) + 1, np.inf)
    best[0] = 0
    steps = []
    for used in replicas:
        times = np.maximum(np.maximum(best, table.cut)[:, None], table.stage(used))
        steps.append(times.argmin(axis=0))
        best = times.min(axis=0)
    ends = [len(chain)]
    for step in reversed(steps):
        ends.insert(0, int(step[ends[0]]))
    return [Stage(*ends_of, used) for ends_of, used in zip(itertools.pairwise(ends), replicas)]
