"""Times and bytes of each step of a training: the arithmetic, without TensorFlow or Keras."""

from __future__ import annotations

import collections
import dataclasses
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfscale.native.bucket import BucketId
    from tfscale.native.log import Execution


@dataclasses.dataclass
class Window:
    """A measured interval: an execution (``steps_per_execution``), or several very short steps.

    An interval begins with its first step and ends when the next one begins, or when the epoch's
    training ends. Bytes and seconds are sums over its steps.

    Attributes:
        batch: the place of its first step in the epoch.
        step: the number of its first step, as the optimizer counts batches.
        samples: number of samples of all replicas; None if unknown.
        usual: False for intervals that no mean counts, because a graph was traced or a profile
            taken meanwhile.
        communication: seconds in which a collective of the rank was running.
        exposed: seconds from when the rank handed over its last gradients until it had all sums. It
            is the minimum over this process's ranks, since the others wait for that rank. Sums in
            the background do not count.
        waited: seconds in which the rank had to wait: exposed seconds, sums within the step, such
            as those of rows and statistics, and sums in the background that had not come.
        sent: bytes that other ranks received from the ranks of this process.
        saved: additional bytes that the wire ``"fp32"`` would have needed.
    """

    epoch: int
    batch: int
    step: int
    steps: int
    begin: float
    end: float = 0.0
    samples: int | None = None
    usual: bool = True
    communication: float | None = None
    exposed: float | None = None
    waited: float | None = None
    sent: int | None = None
    saved: int | None = None

    @property
    def seconds(self) -> float:
        """Length of the interval."""
        return self.end - self.begin

    def account(
        self,
        ranks: Sequence[Sequence[Execution]],
        saved: Callable[[BucketId], float],
        behind_steps: Callable[[BucketId], bool],
        behind: float = 0.0,
    ) -> None:
        """Record the executions that each rank began in this interval, in that order.

        Args:
            ranks: executions of each rank of this process.
            saved: returns the additional bytes as ``"fp32"`` for each byte of a bucket.
            behind_steps: returns whether a bucket is summed in the background, while later steps
                run.
            behind: seconds that steps have waited for sums in the background.
        """
        exposed = [_exposed(one for one in mine if not behind_steps(one.bucket)) for mine in ranks]
        within = [[_span(one) for one in mine if not one.bucket.owner] for mine in ranks]
        self.exposed, self.communication = min(
            (_seconds(spans), _seconds(map(_span, mine)))
            for spans, mine in zip(exposed, ranks, strict=True)
        )
        # A loss's sum may wait for the same rank as the exposed sums do, at the same time.
        self.waited = behind + min(map(_seconds, map(operator.add, exposed, within)))
        self.sent = sum(one.sent for mine in ranks for one in mine)
        self.saved = round(sum(one.sent * saved(one.bucket) for r in ranks for one in r))


def split(executions: Sequence[Execution], windows: Sequence[Window]) -> list[Sequence[Execution]]:
    """Return the executions of each interval, from one rank's, sorted by their starts."""
    starts = [one.start for one in executions]
    places = [(bisect_left(starts, t.begin), bisect_left(starts, t.end)) for t in windows]
    return [executions[first:last] for first, last in places]


_Span = tuple[float, float]  # the beginning and the end


def _span(execution: Execution) -> _Span:
    return execution.start, execution.end


def _seconds(spans: Iterable[_Span]) -> float:
    """Return the seconds that at least one of these spans covers."""
    total, until = 0.0, 0.0
    for begin, end in sorted(spans):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total


def _exposed(executions: Iterable[Execution]) -> list[_Span]:
    """Return the exposed spans; executions are in the order of steps."""
    seen: collections.Counter[BucketId] = collections.Counter()
    exchanges: dict[tuple[str, int], list[Execution]] = {}
    for one in executions:
        if one.bucket.owner:
            seen[one.bucket] += 1
            exchanges.setdefault((one.bucket.owner, seen[one.bucket]), []).append(one)
    return [
        (max(one.start for one in each), max(one.end for one in each))
        for each in exchanges.values()
    ]


# One efficiency compares with a single device; the other assumes that only exposed time is lost.
EFFICIENCIES = MEASURED, ESTIMATED = "efficiency_measured", "efficiency_estimated"


@dataclasses.dataclass
class Mean:
    """Sums over intervals, and the resulting means per step and per second."""

    steps: int = 0
    seconds: float = 0.0
    counted: dict[str, float] = dataclasses.field(default_factory=dict)
    # steps of the intervals that know the number
    over: dict[str, int] = dataclasses.field(default_factory=dict)
    during: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds of these intervals

    def add(self, window: Window) -> None:
        """Add an interval."""
        self.steps += window.steps
        self.seconds += window.seconds
        for what in ("samples", "communication", "exposed", "sent", "saved"):
            value = getattr(window, what)
            if value is not None:
                self.counted[what] = self.counted.get(what, 0) + value
                self.over[what] = self.over.get(what, 0) + window.steps
                self.during[what] = self.during.get(what, 0) + window.seconds

    def merge(self, other: Mean) -> None:
        """Add the sums of another mean."""
        self.steps += other.steps
        self.seconds += other.seconds
        for mine, more in (
            (self.counted, other.counted), (self.over, other.over), (self.during, other.during),
        ):  # fmt: skip
            for what, value in more.items():
                mine[what] = mine.get(what, 0) + value  # type: ignore[assignment]

    def per_step(self, what: str) -> float | None:
        """Return the mean over the steps that know the number; None if there are none."""
        return self.counted[what] / self.over[what] if self.over.get(what) else None

    def share(self, what: str) -> float | None:
        """Return the sum over the seconds of the intervals that know the number."""
        return self.counted[what] / self.during[what] if self.during.get(what) else None

    def numbers(self, devices: int, baseline: float | None) -> dict[str, float]:
        """Return all known numbers, by the names that docs/telemetry.md explains."""
        rate, exposed = self.share("samples"), self.share("exposed")
        found: dict[str, Any] = {
            "step_ms": 1e3 * self.seconds / self.steps if self.steps else None,
            "samples_per_second": rate,
            "communication_ms": _times(1e3, self.per_step("communication")),
            "exposed_ms": _times(1e3, self.per_step("exposed")),
            "sent_mb": _times(1e-6, self.per_step("sent")),
            "saved_mb": _times(1e-6, self.per_step("saved")),
        }
        if baseline is not None and rate is not None:
            found[MEASURED] = rate / (devices * baseline)
        elif baseline is None and exposed is not None:
            found[ESTIMATED] = 1 - exposed
        return {name: value for name, value in found.items() if value is not None}


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value
