"""Grids: which replicas hold one model together, and which hold the same part of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfscale.support import arguments

DATA, EXPERTS, STAGES, TENSOR = "data", "experts", "stages", "tensor"


@dataclasses.dataclass(frozen=True)
class Grid:
    r"""Grid of replicas, with an axis for each way to share out a model's training.

    The replicas of rank :math:`r` lie in a grid of :math:`D \times E \times S \times T` places:
    rank

    .. math:: r = ((d E + e) S + s) T + t

    has the part :math:`d E + e` of each batch, the share :math:`e` of the experts, the stage
    :math:`s` of the model and the slice :math:`t` of each split weight. The :math:`S T` ranks of
    one part of the batch are a *model team*: they hold one model together and read the same rows.
    Neighbours have near ranks, so the axis that sends most, ``tensor``, stays within a host if the
    host has enough devices.

    Args:
        data: number of replicas of each share of the experts, each of which reads a part of the
            batch; None for as many as the number of replicas allows. Without ``experts``, this is
            the number of parts of each batch.
        stages: number of stages of the model.
        tensor: number of slices of each split weight.
        experts: number of shares of the experts of each ``tfscale.parallel.Experts``.

    Example:
        >>> grid = Grid(tensor=2).of(replicas=6)
        >>> grid.data, [grid.part_of_batch(rank) for rank in range(6)]
        (3, [0, 0, 1, 1, 2, 2])

    Reference:
        Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053; Narayanan et al.,
        "Efficient large-scale language model training", https://arxiv.org/abs/2104.04473.
    """

    data: int | None = None
    stages: int = 1
    tensor: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        if self.data is not None:
            arguments.whole(self.data, "data", least=1)
        arguments.whole(self.stages, "stages", least=1)
        arguments.whole(self.tensor, "tensor", least=1)
        arguments.whole(self.experts, "experts", least=1)

    def of(self, replicas: int) -> Grid:
        """Return this grid with all its sizes, for a number of replicas.

        Raises:
            ValueError: the replicas do not fill the grid.
        """
        each = self.team * self.experts
        data = replicas // each if self.data is None else self.data
        if data * each != replicas or not data:
            needed = f"a multiple of {each}" if self.data is None else f"{data * each}"
            raise ValueError(
                f"{self} needs {needed} replicas, but there are {replicas}. Start another number "
                "of workers, give each worker another number of devices, or change the grid"
            )
        return dataclasses.replace(self, data=data)

    @property
    def team(self) -> int:
        """Number of replicas that hold one model together."""
        return self.stages * self.tensor

    @property
    def replicas(self) -> int:
        """Number of places of the grid, once ``data`` is known."""
        return math.prod((self.data or 1, self.experts, self.stages, self.tensor))

    @property
    def is_plain(self) -> bool:
        """Whether each replica holds a whole model."""
        return self.team == self.experts == 1

    def part_of_batch(self, rank: int) -> int:
        """Return which part of each batch a rank has."""
        return rank // self.team

    def gives_outputs(self, rank: int) -> bool:
        """Return whether a rank gives its team's outputs: the first slice of the last stage."""
        return self.stage(rank) == self.stages - 1 and self.slice(rank) == 0

    def share_of_experts(self, rank: int) -> int:
        """Return which share of the experts a rank has."""
        return self.part_of_batch(rank) % self.experts

    def stage(self, rank: int) -> int:
        """Return which stage of the model a rank has."""
        return rank // self.tensor % self.stages

    def slice(self, rank: int) -> int:
        """Return which slice of each split weight a rank has."""
        return rank % self.tensor

    def teams(self, *axes: str, parts: Sequence[int] | None = None) -> list[list[int]]:
        """Return the ranks that differ in these axes only, as a list of teams.

        Args:
            axes: the axes.
            parts: for each place along the axis ``stages``, the number of the part of the model
                that is there. Places with the same part do not differ.

        Example:
            >>> Grid(data=2, tensor=2).teams("data")
            [[0, 2], [1, 3]]
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.replicas):
            place = {
                DATA: self.part_of_batch(rank) // self.experts,
                EXPERTS: self.share_of_experts(rank),
                STAGES: self.stage(rank) if parts is None else parts[self.stage(rank)],
                TENSOR: self.slice(rank),
            }
            common = tuple(place[axis] for axis in place if axis not in axes)
            found.setdefault(common, []).append(rank)
        return list(found.values())

    def check_workers(self, devices: int) -> None:
        """Raise unless each worker has whole model teams, or a part of one.

        Args:
            devices: number of replicas of each worker.
        """
        if devices % self.team and self.team % devices:
            raise ValueError(
                f"{self} puts {self.team} replicas into a model team, and each worker has "
                f"{devices}: a team would have parts of two workers. Take a number of devices for "
                f"each worker that divides {self.team}, or a multiple of {self.team}"
            )
