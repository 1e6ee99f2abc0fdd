"""Teams along the axes of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfscale.exchange.collective_schedules import Algorithm, CollectiveSchedules
from tfscale.exchange.team import Team
from tfscale.parallel.grid import EXPERTS, STAGES, TENSOR, Grid
from tfscale.strategy.teams import Teams, refuse_schedule


class GridTeams:
    """Teams of the replicas of this process, along the axes of a grid.

    Attributes:
        grid: the grid, with all its sizes.
        everybody: team of all replicas.
        stages: team of the replicas that hold the stages of one model; None for one replica.
        tensor: team of the replicas that hold slices of one stage; None for one replica.
        experts: team of the replicas that hold all experts together; None for one replica.
        readers: model team, if it has replicas of several workers, whose first one reads the rows
            of all; else None.
    """

    def __init__(
        self,
        extended: Any,
        grid: Grid,
        everybody: Team,
        algorithm: Algorithm,
        schedules: CollectiveSchedules,
    ) -> None:
        refuse_schedule(algorithm, f"{grid} has teams of several sizes")
        self.grid, self.everybody = grid, everybody
        self._first_rank = extended.first_rank
        self._extended, self._algorithm, self._schedules = extended, algorithm, schedules
        self._twins: dict[str, Teams] = {}
        self.stages = self.twins(STAGES).team
        self.tensor = self.twins(TENSOR).team
        self.experts = self.twins(EXPERTS).team
        spans_workers = grid.team > len(extended.devices)
        self.readers = self.twins(STAGES, TENSOR).team if spans_workers else None

    def twins(self, *axes: str, parts: Sequence[int] | None = None) -> Teams:
        """Return teams of the replicas that differ in these axes only; see ``Grid.teams``."""
        ranks = self.grid.teams(*axes, parts=parts)
        if str(ranks) not in self._twins:
            self._twins[str(ranks)] = Teams.of(
                self._extended, ranks, self._algorithm, self._schedules
            )
        return self._twins[str(ranks)]

    def slice(self, replica: int) -> int:
        """Return which slice of split weights a replica of this process has."""
        return self.grid.slice(self._first_rank + replica)
