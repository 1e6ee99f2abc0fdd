"""What computes and what travels, step by step: for Perfetto, and as a picture.

TensorFlow's profiler says when each op ran, the engine's log when each bucket of
gradients travelled; both in seconds of ``time.time()``.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfscale.bench.plot import FAINT, INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tfscale.bench.fit_worker import Fit

Span = tuple[str, float, float]  # what, from, to

# An op and its type, unless it waits for others rather than computes.
_COMPUTES = re.compile(r"^[^:]+:(?!Tfscale|Iterator|\w*PartitionedCall|_Recv|_Send)\w+$")
_BACKWARD = re.compile(r"gradient_tape|Grad|Backprop")


@dataclasses.dataclass(frozen=True)
class Trace:
    """Some steps of one rank. ``compute`` are its ops, ``buckets`` its exchanges."""

    rank: int
    ends: Sequence[float]  # of each step
    compute: Sequence[Span]
    buckets: Sequence[Span]


def take(training: Fit, untimed: int, steps: int) -> dict[str, Any]:
    """Train so many steps and see; called in a worker."""
    import tensorflow as tf

    communicator = training.strategy.reducer.exchange.communicators[0]
    with tempfile.TemporaryDirectory(prefix="tfscale-trace-") as folder:
        tf.profiler.experimental.start(folder)
        ends = training.steps(untimed + steps)[untimed - 1 :]
        tf.profiler.experimental.stop()
        compute = list(_ops(next(Path(folder).rglob("*.xplane.pb")).read_bytes()))
    shift = time.time() - time.perf_counter()
    ends = [end + shift for end in ends]
    spans = {
        "compute": compute,
        "buckets": [(run.bucket, run.start, run.end) for run in communicator.log()],
    }
    within = {
        kind: sorted((s for s in each if ends[0] <= s[1] <= ends[-1]), key=lambda span: span[1])
        for kind, each in spans.items()
    }
    return {"rank": communicator.rank, "ends": ends, **within}


def _ops(data: bytes) -> Iterator[Span]:
    """Ops that compute, by the profiler's file."""
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


def chrome(traces: Sequence[Trace]) -> dict[str, Any]:
    """The format of chrome://tracing: a process for each rank, with two tracks."""
    begin = min(trace.ends[0] for trace in traces)
    events: list[dict[str, Any]] = []
    for trace in traces:
        events += [
            {"ph": "M", "pid": trace.rank, "name": "process_name",
             "args": {"name": f"rank {trace.rank}"}},
            {"ph": "M", "pid": trace.rank, "tid": 0, "name": "thread_name",
             "args": {"name": "compute"}},
        ]  # fmt: skip
        for start, end, backward in busy(trace.compute):
            events.append({"ph": "X", "pid": trace.rank, "tid": 0, "cat": "compute",
                           "name": "backward" if backward else "forward and update",
                           "ts": 1e6 * (start - begin), "dur": 1e6 * (end - start)})  # fmt: skip
        for number, (name, start, end) in enumerate(trace.buckets):
            common = {"pid": trace.rank, "cat": "exchange", "name": name.partition("/")[2],
                      "id": f"{trace.rank}-{number}"}  # fmt: skip
            events.append({**common, "ph": "b", "ts": 1e6 * (start - begin)})
            events.append({**common, "ph": "e", "ts": 1e6 * (end - begin)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def busy(ops: Sequence[Span], gap: float = 2e-4) -> list[tuple[float, float, bool]]:
    """Ops on any thread as stretches of one track: from, to, and whether of the backward pass.

    What is nearer than ``gap`` is one stretch: an op's work is often on other threads.
    """
    found: list[tuple[float, float, bool]] = []
    for name, start, end in ops:
        backward = bool(_BACKWARD.search(name))
        if found and found[-1][2] == backward and start <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(end, found[-1][1]), backward)
        elif not found or end > found[-1][1]:
            found.append((max(start, found[-1][1]) if found else start, end, backward))
    return found


def exposed_seconds(traces: Sequence[Trace]) -> float:
    """How long gradients travel in a step while nothing computes.

    The median over steps, of the rank for which it is shortest: the others wait for that
    one's computation, not for the exchange.
    """
    steps = range(len(traces[0].ends) - 1)
    return statistics.median(min(_exposed(_step(t, number)) for t in traces) for number in steps)


def _exposed(trace: Trace) -> float:
    gradients = [span for span in trace.buckets if "gradients" in span[0]]
    both = busy(sorted([*gradients, *trace.compute], key=lambda span: span[1]), 0)
    return _length(both) - _length(busy(trace.compute, 0))


def _length(stretches: Sequence[tuple[float, float, bool]]) -> float:
    return sum(end - start for start, end, _ in stretches)


def draw(traces: Sequence[Trace]) -> Figure:
    """The last step: each rank's compute in one row, each exchange in a row below."""
    from matplotlib.figure import Figure

    buckets = max(len(_step(trace, -1).buckets) for trace in traces)
    height = 0.9 + len(traces) * (0.9 + 0.13 * buckets)
    figure = Figure(figsize=(9.0, height), layout="constrained")
    panels = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    begin = min(trace.ends[-2] for trace in traces)
    for panel, trace in zip(panels, [_step(each, -1) for each in traces], strict=True):
        for start, end, backward in busy(trace.compute):
            colour = _BACKWARD_COLOUR if backward else _FORWARD_COLOUR
            panel.barh(-1.5, 1e3 * (end - start), 2, 1e3 * (start - begin), color=colour)
        for row, (_, start, end) in enumerate(trace.buckets):
            panel.barh(row, 1e3 * (end - start), 0.8, 1e3 * (start - begin), color=_BUCKET_COLOUR)
        panel.set_yticks([-1.5, max(0, len(trace.buckets) - 1) / 2], ["compute", "exchanges"])
        panel.invert_yaxis()
        panel.set_title(f"rank {trace.rank}", loc="left", fontsize=9, color=INK)
        panel.grid(axis="x", color=FAINT, linewidth=0.7)
        panel.set_axisbelow(True)
        panel.tick_params(colors=INK, labelsize=8, length=0)
        for side in panel.spines.values():
            side.set_visible(False)
    panels[-1].set_xlabel("ms", fontsize=8, color=INK)
    _legend(figure)
    return figure


_FORWARD_COLOUR, _BACKWARD_COLOUR, _BUCKET_COLOUR = "#a9aeb6", "#3b6fb6", "#e07b39"


def _legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    colours = {
        "forward and update": _FORWARD_COLOUR,
        "backward": _BACKWARD_COLOUR,
        "exchanges": _BUCKET_COLOUR,
    }
    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False, fontsize=8)


def _step(trace: Trace, number: int) -> Trace:
    """One of its steps alone; -1 is the last."""
    first, last = list(zip(trace.ends, trace.ends[1:], strict=False))[number]

    def inside(spans: Sequence[Span]) -> list[Span]:
        return [span for span in spans if first <= span[1] < last]

    return Trace(trace.rank, (first, last), inside(trace.compute), inside(trace.buckets))
