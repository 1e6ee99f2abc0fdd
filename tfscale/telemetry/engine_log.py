"""What a process's ranks have exchanged, and how: read from the strategy and the engine's log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfscale.exchange.deciding import Change
from tfscale.exchange.explain import Row, rows
from tfscale.exchange.reducer import Reducer
from tfscale.ops import Communicator
from tfscale.ops.bucket import BucketId
from tfscale.ops.log import Execution


class EngineLog:
    """The ranks of this process.

    Args:
        reducers: the strategy's; where groups of replicas sum each for itself, one of a group's.
    """

    def __init__(self, reducers: Sequence[Reducer]) -> None:
        self._reducers = reducers
        exchanges = list({id(each.exchange): each.exchange for each in reducers}.values())
        self._exchange = max(exchanges, key=lambda each: each.ranks)
        self.communicators: list[Communicator] = self._exchange.communicators
        self._each = list(zip(*(each.communicators for each in exchanges), strict=True))
        self._calls = {one: _calls(one) for every in self._each for one in every}
        self.rows: list[Row] = []  # as of the last call of changes()
        self._saved: dict[BucketId, float] = {}
        self._told = set(self._made())

    @property
    def ranks(self) -> list[int]:
        """Those of this process."""
        return [each.rank for each in self.communicators]

    @property
    def is_measured(self) -> bool:
        """Whether gradients go by the engine, which logs when and how many bytes."""
        return self._exchange.is_measured

    @property
    def is_lossy(self) -> bool:
        """Whether any gradient may be summed by a method that loses something."""
        return any(not m.lossless for reducer in self._reducers for m in reducer.policy.methods)

    def ways(self) -> list[str]:
        """How gradients go from each rank of this process to the others, in words."""
        return [self._exchange.ways(place) for place in range(len(self.communicators))]

    @property
    def processes(self) -> int:
        """How many processes the group has."""
        return self.communicators[0].ranks // len(self.communicators)

    def sent(self) -> int:
        """Bytes that others have taken from these ranks since they exist, all collectives."""
        return sum(t.sent for one in self._calls for t in one.totals().values())

    def read(self) -> tuple[list[list[Execution]], float]:
        """What each rank has run since the last call, by its start; and since when that is all.

        The engine remembers a few thousand collectives: those before them are in its totals,
        and not known one by one. The moment is 0 where none is missing.
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
        """Buckets that are new or have another schedule than at the last call: before, now."""
        before = {row.bucket: row for row in self.rows}
        now = [row for reducer in self._reducers for row in rows(reducer)]
        self.rows = now
        self._saved = {name: row.saved - 1 for row in now for name in row.collectives}
        pairs = [(before.get(row.bucket), row) for row in now]
        return [(old, new) for old, new in pairs if old is None or old.algorithm != new.algorithm]

    def new_methods(self) -> list[Change]:
        """Buckets that have another method since the last call, where methods are chosen live."""
        fresh = [change for change in self._made() if change not in self._told]
        self._told.update(fresh)
        return fresh

    def _made(self) -> list[Change]:
        packings = [each for reducer in self._reducers for each in list(reducer.packings.values())]
        return [change for packing in packings for change in packing.changes]

    def saved(self, bucket: BucketId) -> float:
        """Bytes that each byte on the wire saves, against the wire ``"fp32"``."""
        return self._saved.get(bucket.untraced, 0.0)

    def is_behind_steps(self, bucket: BucketId) -> bool:
        """Whether it travels while steps go on, and its sum is taken later."""
        return any(bucket.untraced in reducer.behind_steps for reducer in self._reducers)


def _calls(communicator: Communicator) -> int:
    return sum(total.calls for total in communicator.totals().values())


def engine_log_of(strategy: Any) -> EngineLog | None:
    """The wire of a strategy; None where tfscale exchanges nothing."""
    reducer = getattr(strategy, "reducer", None)
    if not isinstance(reducer, Reducer) or reducer.exchange.ranks == 1:
        return None
    return EngineLog(getattr(strategy, "reducers", [reducer]))
