"""Teams along the axes of a grid."""

from __future__ import annotations

from typing import Any

from tfscale.collectives import Schedule
from tfscale.exchange.collective_schedules import Algorithm, CollectiveSchedules
from tfscale.exchange.team import Team
from tfscale.native import Group
from tfscale.parallel.grid import DATA, EXPERTS, STAGES, TENSOR, Grid
from tfscale.strategy.teams import divided


class GridTeams:
    """Teams of the replicas of this process, along the axes of a grid.

    Attributes:
        grid: the grid, with all its sizes.
        everybody: team of all replicas.
        data: team of the replicas that hold the same part of the model; None for one replica.
        stages: team of the replicas that hold the stages of one model; None for one replica.
        tensor: team of the replicas that hold slices of one stage; None for one replica.
        experts: team of the replicas that hold all experts together; None for one replica.
        readers: model team, if it has replicas of several workers, whose first one reads the rows
            of all; else None.
        parts: groups of the engine.
    """

    def __init__(
        self,
        extended: Any,
        grid: Grid,
        everybody: Team,
        algorithm: Algorithm,
        schedules: CollectiveSchedules,
    ) -> None:
        if isinstance(algorithm, Schedule):
            raise ValueError(
                f"the schedule {algorithm.name} is for {algorithm.ranks} ranks, and {grid} has "
                "teams of several sizes. Pass the name of an algorithm, or a function from a "
                "number of ranks to a schedule"
            )
        self.grid, self.everybody = grid, everybody
        self._first_rank = extended.first_rank
        self.parts: list[Group] = []

        def along(*axes: str) -> Team | None:
            teams = grid.teams(*axes)
            if len(teams[0]) == 1:
                return None
            parts, team = divided(extended, teams, algorithm, schedules)
            self.parts += parts
            return team

        self.stages, self.tensor, self.data = along(STAGES), along(TENSOR), along(DATA)
        self.experts = along(EXPERTS)
        spans_workers = grid.team > len(extended.devices)
        self.readers = along(STAGES, TENSOR) if spans_workers else None

    def slice(self, replica: int) -> int:
        """Return which slice of split weights a replica of this process has."""
        return self.grid.slice(self._first_rank + replica)
