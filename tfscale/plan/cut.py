"""Cuts of a model, and their prices."""

from __future__ import annotations

import dataclasses

from tfscale.plan.formulas.state import SHARDS

# Orders of pipelines, and the number of stages of each rank.
CHUNKS = {"1f1b": 1, "zero bubble": 1, "interleaved": 2}
ORDERS = tuple(CHUNKS)


@dataclasses.dataclass(frozen=True)
class Cut:
    """The sizes of a cut of a model, and what is done to save memory.

    Args:
        rows: ranks that share each sample (model, tensor or domain parallelism).
        columns: parts into which a microbatch is cut (data parallelism).
        stages: ranks of the pipeline.
        microbatches: parts of a batch that pass the pipeline one after another.
        order: order of the pipeline's work.
        shard: what the columns hold in shards: see ``formulas.state``.
        recompute: whether the backward pass computes activations again.
        wire: the format in which gradients are sent.
        lean: whether rows share units so that each rank holds little, not so that a step is short.
        every: number of steps after which hosts, or racks if there are any, agree: DiLoCo.
        offload: whether the optimizer's state is kept in the hosts' memory.
    """

    rows: int = 1
    columns: int = 1
    stages: int = 1
    microbatches: int = 1
    order: str = "1f1b"
    shard: str = "none"
    recompute: bool = False
    wire: str = "fp32"
    lean: bool = False
    every: int = 1
    offload: bool = False

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return self.rows * self.columns * self.stages

    @property
    def chunks(self) -> int:
        """Number of stages of each rank of the pipeline."""
        return CHUNKS[self.order]

    def __str__(self) -> str:
        zero = SHARDS.index(self.shard)
        told = {
            f"data {self.columns}": True,
            f"rows {self.rows}": self.rows > 1,
            f"stages {self.stages}, {self.order}": self.stages > 1,
            f"{self.microbatches} microbatches": self.microbatches > 1,
            f"ZeRO-{zero}": zero > 0,
            "recompute": self.recompute,
            "lean": self.lean,
            f"DiLoCo {self.every}": self.every > 1,
            "offload": self.offload,
            self.wire: self.wire != "fp32",
        }
        return ", ".join(name for name, is_told in told.items() if is_told)


@dataclasses.dataclass(frozen=True)
class Price:
    """The price of a cut.

    Args:
        cut: the cut.
        seconds: time of a step.
        parts: seconds by what they go to: ``compute``; ``row``, messages in rows; ``bubble``,
            waiting for other stages; ``sums``, gradients, and state that lies in a host's memory;
            ``update``, the optimizer, and what a step takes at least.
        memory: bytes on the fullest rank by what takes them: ``weights``, ``gradients``,
            ``state``, ``activations``, ``buffers``.
        spreads: for each unit the way in which a row shares it.
        ends: for each stage of the model the number of the unit after its last one; a rank has
            several stages if the order says so.
        algorithm: the schedule that sums gradients; empty if there is nothing to sum.
    """

    cut: Cut
    seconds: float
    parts: dict[str, float]
    memory: dict[str, float]
    spreads: tuple[str, ...]
    ends: tuple[int, ...]
    algorithm: str

    @property
    def bytes(self) -> float:
        """Bytes on the fullest rank."""
        return sum(self.memory.values())
