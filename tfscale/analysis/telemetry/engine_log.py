"""The exchanges of a process's ranks, as the strategy and the engine's log record them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfscale.compression.deciding import Change
from tfscale.exchange.bucket_sum import Watch
from tfscale.exchange.explain import Row, rows
from tfscale.exchange.reducer import Reducer
from tfscale.exchange.scaling import scaling
from tfscale.native import Communicator
from tfscale.native.bucket import BucketId
from tfscale.native.log import Execution


class EngineLog:
    """Log of the ranks of this process.

    Args:
        reducers: the strategy's reducers. With groups of replicas, a reducer may sum over one group
            only.
    """

    def __init__(self, reducers: Sequence[Reducer]) -> None:
        self._reducers = reducers
        teams = list({id(each.team): each.team for each in reducers}.values())
        self._team = max(teams, key=lambda each: each.size)
        self.communicators: list[Communicator] = self._team.communicators
        self._each = list(zip(*(each.communicators for each in teams), strict=True))
        self._calls = {one: _calls(one) for every in self._each for one in every}
        self.rows: list[Row] = []  # as of the last call of changes()
        self._saved: dict[BucketId, float] = {}
        self._known_changes = set(self._all_changes())

    @property
    def ranks(self) -> list[int]:
        """The ranks of this process."""
        return [each.rank for each in self.communicators]

    @property
    def ranks_of_workers(self) -> list[list[int]]:
        """The ranks of each process."""
        count, local = self.communicators[0].ranks, len(self.communicators)
        return [list(range(first, first + local)) for first in range(0, count, local)]

    @property
    def is_measured(self) -> bool:
        """Whether gradients go through the engine, which logs times and bytes."""
        return self._team.is_measured

    @property
    def is_lossy(self) -> bool:
        """Whether a lossy method may sum any gradient."""
        return any(not m.lossless for reducer in self._reducers for m in reducer.policy.methods)

    def ways(self) -> list[str]:
        """Describe how gradients go from each rank of this process to the others."""
        return [self._team.ways(place) for place in range(len(self.communicators))]

    @property
    def processes(self) -> int:
        """Number of processes of the group."""
        return self.communicators[0].ranks // len(self.communicators)

    def sent(self) -> int:
        """Return the bytes that others have ever received from these ranks, in all collectives."""
        return sum(t.sent for one in self._calls for t in one.totals().values())

    def read(self) -> tuple[list[list[Execution]], float]:
        """Return each rank's executions since the last call, sorted by start, and a moment.

        The list is complete from that moment on. The engine remembers a few thousand collectives:
        older ones count in its totals, but are not known one by one. The moment is 0 if none is
        missing.
        """
        found, since = [], 0.0
        for every in self._each:
            of_rank: list[Execution] = []
            for communicator in every:
                calls = _calls(communicator)
                fresh = calls - self._calls[communicator]
                executions = communicator.log(fresh) if fresh else []
                if len(executions) < fresh:
                    since = max(since, min(one.end for one in executions))
                self._calls[communicator] = calls
                of_rank += executions
            found.append(sorted(of_rank, key=lambda one: one.start))
        return found, since

    def changes(self) -> list[tuple[Row | None, Row]]:
        """Return the buckets with a new schedule since the last call: before, now."""
        before = {row.bucket: row for row in self.rows}
        now = [row for reducer in self._reducers for row in rows(reducer)]
        self.rows = now
        self._saved = {name: row.saved - 1 for row in now for name in row.collectives}
        pairs = [(before.get(row.bucket), row) for row in now]
        return [(old, new) for old, new in pairs if old is None or old.algorithm != new.algorithm]

    def new_methods(self) -> list[Change]:
        """Return the changes of methods since the last call, if they are chosen live."""
        fresh = [change for change in self._all_changes() if change not in self._known_changes]
        self._known_changes.update(fresh)
        return fresh

    def _all_changes(self) -> list[Change]:
        packings = [each for reducer in self._reducers for each in list(reducer.packings.values())]
        return [change for packing in packings for change in packing.changes]

    def watch(self, function: Watch | None) -> None:
        """Let a function see all gradients on wires that lose precision; None for no function."""
        self._reducers[0].watch = function

    def saved(self, bucket: BucketId) -> float:
        """Return the bytes that each byte on the wire saves, compared with the wire ``"fp32"``."""
        return self._saved.get(bucket.untraced, 0.0)

    def is_behind_steps(self, bucket: BucketId) -> bool:
        """Return whether a bucket is summed in the background, while later steps run."""
        return any(bucket.untraced in reducer.behind_steps for reducer in self._reducers)


def _calls(communicator: Communicator) -> int:
    return sum(total.calls for total in communicator.totals().values())


def engine_log_of(strategy: Any) -> EngineLog | None:
    """Return the log of a strategy's engine; None if tfscale exchanges nothing."""
    ours = scaling(strategy)
    if ours is None or ours.reducer.team.size == 1:
        return None
    return EngineLog(ours.reducers)
