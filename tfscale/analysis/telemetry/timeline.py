"""Computation and exchanges on one time axis, for Perfetto.

TensorFlow's profiler records when each op ran, the engine's log when each bucket of gradients was
exchanged. Both use seconds of ``time.time()``, which the processes of a host share.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tfscale.support import arguments, records

if TYPE_CHECKING:
    from tfscale.compression.deciding import Change
    from tfscale.native.log import Execution

Span = tuple[str, float, float]  # name, start, end


class Exchanged(NamedTuple):
    """One bucket's exchange on one rank."""

    name: str
    start: float
    end: float
    of_gradients: bool

    @classmethod
    def of(cls, one: Execution) -> Exchanged:
        """Return the part of a collective's execution that a timeline shows."""
        return cls(str(one.bucket._replace(graph="")), one.start, one.end, bool(one.bucket.owner))


# Matches an op and its type, unless the op waits for others instead of computing.
_COMPUTES = re.compile(
    r"^[^:]+:(?!Tfscale|Collective|\w*Iterator|\w*PartitionedCall|_Recv|_Send|\w*Dataset)\w+$"
)
_BACKWARD = re.compile(r"gradient_tape|Grad|Backprop")
_REPLICA = re.compile(r"(?:^|/)replica_(\d+)/")


@dataclasses.dataclass(frozen=True)
class RankTimeline:
    """Some steps of one rank.

    Attributes:
        rank: the rank.
        ends: start of the first step, and end of each step.
        compute: the rank's ops.
        buckets: its exchanges.
        ways: description of the transport to the other ranks.
        changes: changes of methods meanwhile.
    """

    rank: int
    ends: Sequence[float]
    compute: Sequence[Span]
    buckets: Sequence[Exchanged]
    ways: str = ""
    changes: Sequence[Change] = ()


class Profile:
    """A profile by TensorFlow's profiler, from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tfscale-trace-")

    def start(self) -> None:
        """Start the profiler; raise ``tf.errors.AlreadyExistsError`` if another one runs."""
        import tensorflow as tf

        tf.profiler.experimental.start(self._folder.name)

    def stop(self) -> list[Span]:
        """Stop the profiler; return the ops that computed meanwhile, in this process."""
        import tensorflow as tf

        tf.profiler.experimental.stop()
        with self._folder as folder:
            return list(_ops(next(Path(folder).rglob("*.xplane.pb")).read_bytes()))


class Recording:
    """A recording of some steps of this process, for a timeline file.

    Args:
        path: the path of the file.
        ranks: the ranks of this process.
        ways: for each rank, a description of its transport to the others.
    """

    def __init__(self, path: Path, ranks: Sequence[int], ways: Sequence[str]) -> None:
        self._path = path
        self._ranks = ranks
        self._ways = ways
        self._profile: Profile | None = None
        self._begins: list[float] = []
        self._buckets: list[list[Exchanged]] = [[] for _ in ranks]
        self._changes: list[Change] = []

    @property
    def runs(self) -> bool:
        """Whether a recording has begun."""
        return bool(self._begins)

    def step(self, now: float) -> None:
        """Note that a step begins."""
        if not self.runs:
            self._start()
        self._begins.append(now)

    def _start(self) -> None:
        import tensorflow as tf

        profile = Profile()
        try:
            profile.start()
            self._profile = profile
        except tf.errors.AlreadyExistsError:
            logging.getLogger("tfscale").warning(_TWO_PROFILES)

    def heard(self, executions: Sequence[Sequence[Execution]]) -> None:
        """Add the ranks' latest exchanges."""
        if self.runs:
            for buckets, mine in zip(self._buckets, executions, strict=True):
                buckets += map(Exchanged.of, mine)

    def changed(self, change: Change) -> None:
        """Add the change of a bucket's method."""
        self._changes.append(change)

    def finish(self, now: float) -> None:
        """Write the file."""
        ops = of_replicas(self._profile.stop() if self._profile else [], len(self._ranks))
        ends = [*self._begins, now]
        changes = [one for one in self._changes if ends[0] <= one.time < ends[-1]]
        timelines = [
            RankTimeline(rank, ends, _within(compute, ends), _within(buckets, ends), ways, changes)
            for rank, ways, compute, buckets in zip(
                self._ranks, self._ways, ops, self._buckets, strict=True
            )
        ]
        records.write(self._path, chrome(timelines, begin=0.0))


_TWO_PROFILES = (
    "the timeline shows no computation: another profile is running, and TensorFlow allows one at "
    "a time. If it is that of keras.callbacks.TensorBoard, turn it off with profile_batch=0"
)


def _within(spans: Sequence[Any], ends: Sequence[float]) -> list[Any]:
    return [span for span in spans if ends[0] <= span[1] < ends[-1]]


def _ops(data: bytes) -> Iterator[Span]:
    """Yield the ops that compute, from the profiler's file."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    planes = {plane.name: plane for plane in xplane_pb2.XSpace.FromString(data).planes}
    environment, host = planes["Task Environment"], planes["/host:CPU"]
    names = {key: each.name for key, each in environment.stat_metadata.items()}
    stats = {names[stat.metadata_id]: stat.uint64_value for stat in environment.stats}
    begin = stats["profile_start_time"] / 1e9
    for line in host.lines:
        for event in line.events:
            name = host.event_metadata[event.metadata_id].name
            start = begin + line.timestamp_ns / 1e9 + event.offset_ps / 1e12
            if _COMPUTES.match(name):
                yield name, start, start + event.duration_ps / 1e12


def of_replicas(ops: Sequence[Span], count: int) -> list[list[Span]]:
    """Return each replica's ops; TensorFlow names the replica in all but the first one's."""
    each: list[list[Span]] = [[] for _ in range(count)]
    for op in sorted(ops, key=lambda span: span[1]):
        named = _REPLICA.search(op[0])
        replica = int(named[1]) if named else 0
        if replica < count:
            each[replica].append(op)
    return each


def chrome(timelines: Sequence[RankTimeline], begin: float | None = None) -> dict[str, Any]:
    """Return timelines in the format of chrome://tracing: a process for each rank, with two tracks.

    Args:
        timelines: a timeline for each rank.
        begin: the moment that becomes 0; by default the beginning of the first step.
    """
    begin = min(timeline.ends[0] for timeline in timelines) if begin is None else begin
    events: list[dict[str, Any]] = []
    for timeline in timelines:
        events += [
            {"ph": "M", "pid": timeline.rank, "name": "process_name",
             "args": {"name": f"rank {timeline.rank}" + (timeline.ways and f", {timeline.ways}")}},
            {"ph": "M", "pid": timeline.rank, "tid": 0, "name": "thread_name",
             "args": {"name": "compute"}},
        ]  # fmt: skip
        for start, end, backward in busy(timeline.compute):
            events.append({"ph": "X", "pid": timeline.rank, "tid": 0, "cat": "compute",
                           "name": "backward" if backward else "forward and update",
                           "ts": 1e6 * (start - begin), "dur": 1e6 * (end - start)})  # fmt: skip
        for number, (name, start, end, _) in enumerate(timeline.buckets):
            common = {"pid": timeline.rank, "cat": "exchange", "name": name,
                      "id": f"{timeline.rank}-{number}"}  # fmt: skip
            events.append({**common, "ph": "b", "ts": 1e6 * (start - begin)})
            events.append({**common, "ph": "e", "ts": 1e6 * (end - begin)})
        for change in timeline.changes:
            events.append({"ph": "i", "s": "p", "pid": timeline.rank, "tid": 0, "cat": "method",
                           "name": f"{change.bucket}: {change.after} instead of {change.before}",
                           "ts": 1e6 * (change.time - begin),
                           "args": {"why": change.why, "step": change.step}})  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def merge(files: Sequence[str | Path], to: str | Path) -> None:
    """Merge the timelines of several processes.

    Clocks of different hosts may differ slightly; processes of one host share a clock.

    Args:
        files: the files that ``Telemetry(timeline=...)`` wrote, one per process.
        to: the file to write.

    Example:
        >>> tfscale.telemetry.merge(sorted(Path(".").glob("trace.rank*.json")), "trace.json")
    """
    files = arguments.items(files, "files", "a list of paths", arguments.path, least=0)
    to = arguments.path(to, "to")
    events = [
        event for file in files for event in json.loads(Path(file).read_text())["traceEvents"]
    ]
    records.write(Path(to), {"traceEvents": events, "displayTimeUnit": "ms"})


def busy(ops: Sequence[Span], gap: float = 2e-4) -> list[tuple[float, float, bool]]:
    """Merge ops of all threads into stretches: start, end, and whether of the backward pass.

    Ops less than ``gap`` apart count as one stretch, because an op's work is often on other
    threads.
    """
    found: list[tuple[float, float, bool]] = []
    for name, start, end in ops:
        backward = bool(_BACKWARD.search(name))
        if found and found[-1][2] == backward and start <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(end, found[-1][1]), backward)
        elif not found or end > found[-1][1]:
            found.append((max(start, found[-1][1]) if found else start, end, backward))
    return found


def exposed_seconds(timelines: Sequence[RankTimeline]) -> float:
    """Return the time in a step in which gradients are exchanged while nothing computes.

    The result is the median over steps of the minimum over ranks: the other ranks wait for that
    rank's computation, not for the exchange.
    """
    steps = range(len(timelines[0].ends) - 1)
    return statistics.median(min(_exposed(step_of(t, n)) for t in timelines) for n in steps)


def _exposed(timeline: RankTimeline) -> float:
    gradients = [one[:3] for one in timeline.buckets if one.of_gradients]
    both = busy(sorted([*gradients, *timeline.compute], key=lambda span: span[1]), 0)
    return _length(both) - _length(busy(timeline.compute, 0))


def _length(stretches: Sequence[tuple[float, float, bool]]) -> float:
    return sum(end - start for start, end, _ in stretches)


def step_of(timeline: RankTimeline, number: int) -> RankTimeline:
    """Return a timeline with one step only; -1 is the last."""
    first, last = list(zip(timeline.ends, timeline.ends[1:], strict=False))[number]

    def inside(spans: Sequence[Any]) -> list[Any]:
        return [span for span in spans if first <= span[1] < last]

    return dataclasses.replace(
        timeline,
        ends=(first, last),
        compute=inside(timeline.compute),
        buckets=inside(timeline.buckets),
    )
