"""Trace of computations and exchanges in ``tfscale bench fit``, as numbers and as a picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfscale.analysis.telemetry.timeline import (
    Exchanged,
    Profile,
    RankTimeline,
    busy,
    chrome,
    exposed_seconds,
    step_of,
)
from tfscale.native import Communicator
from tfscale.support import figures
from tfscale.support.figures import INK, bare
from tfscale.tools.bench.plot import FAINT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["RankTimeline", "busy", "chrome", "draw", "exposed_seconds", "take", "taken"]


def take(
    communicator: Communicator, train: Callable[[int], Sequence[float]], untimed: int, steps: int
) -> dict[str, Any]:
    """Train for some steps in a worker and return their trace.

    Args:
        communicator: communicator of the worker's first replica.
        train: makes a number of steps, and returns the time at which each one ended.
        untimed: number of steps to make first, which the trace leaves out.
        steps: number of steps in the trace.
    """
    profile = Profile()
    profile.start()
    ends = train(untimed + steps)[untimed - 1 :]
    compute = profile.stop()
    shift = time.time() - time.perf_counter()
    ends = [end + shift for end in ends]
    spans: dict[str, Sequence[Any]] = {
        "compute": compute,
        "buckets": list(map(Exchanged.of, communicator.log())),
    }
    within = {
        kind: sorted((s for s in each if ends[0] <= s[1] <= ends[-1]), key=lambda span: span[1])
        for kind, each in spans.items()
    }
    return {"rank": communicator.rank, "ends": ends, **within}


def taken(answer: dict[str, Any]) -> RankTimeline:
    """Return the timeline in an answer of ``take`` that was sent as JSON."""
    buckets = [Exchanged(*each) for each in answer["buckets"]]
    return RankTimeline(**{**answer, "buckets": buckets})


def draw(timelines: Sequence[RankTimeline]) -> Figure:
    """Draw the last step: each rank's computations in one row, each exchange in a row below."""
    buckets = max(len(step_of(timeline, -1).buckets) for timeline in timelines)
    height = 0.9 + len(timelines) * (0.9 + 0.13 * buckets)
    figure = figures.figure(9.0, height)
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    begin = min(timeline.ends[-2] for timeline in timelines)
    for panel, timeline in zip(panels, [step_of(each, -1) for each in timelines], strict=True):
        for start, end, backward in busy(timeline.compute):
            colour = _BACKWARD_COLOUR if backward else _FORWARD_COLOUR
            panel.barh(-1.5, 1e3 * (end - start), 2, 1e3 * (start - begin), color=colour)
        for row, (_, start, end, _) in enumerate(timeline.buckets):
            panel.barh(row, 1e3 * (end - start), 0.8, 1e3 * (start - begin), color=_BUCKET_COLOUR)
        panel.set_yticks([-1.5, max(0, len(timeline.buckets) - 1) / 2], ["compute", "exchanges"])
        panel.invert_yaxis()
        panel.set_title(f"rank {timeline.rank}", loc="left", fontsize=9, color=INK)
        panel.grid(axis="x", color=FAINT, linewidth=0.7)
        panel.set_axisbelow(True)
        bare(panel)
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
