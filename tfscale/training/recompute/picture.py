"""Pictures of memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfscale.support import figures
from tfscale.training.recompute.text import show


@dataclass(frozen=True)
class Curve:
    """The memory of a step over time.

    Args:
        label: description for the legend.
        sizes: bytes at each moment.
        color: color of the line.
    """

    label: str
    sizes: Sequence[float]
    color: str


def draw(curves: Sequence[Curve], shaded: Sequence[range], budget: float | None) -> Any:
    """Return a matplotlib figure.

    Args:
        curves: the curves. The first one is the highest.
        shaded: moments of recomputation.
        budget: budget in bytes, if there is one.
    """
    figure = figures.figure(9, 4)
    axes = figure.add_subplot()
    for curve in curves:
        axes.plot([size / 1e6 for size in curve.sizes], color=curve.color, label=curve.label)
    for run in shaded:
        axes.axvspan(run.start, run.stop, color="C1", alpha=0.3, linewidth=0)
    if budget is not None and budget < max(curves[0].sizes):
        axes.axhline(budget / 1e6, color="C3", linestyle=":", label=f"budget: {show(budget)}")
    elif budget is not None:  # a line far above would flatten the rest
        axes.plot([], linestyle="", label=f"budget: {show(budget)}, more than plain takes")
    axes.set_xlabel("operations of one step (shaded: computed again)")
    axes.set_ylabel("MB beside variables")
    axes.legend(loc="upper right")
    return figure


def runs_of(chosen: Sequence[bool]) -> list[range]:
    """Return the runs of neighbours that are chosen."""
    edges = [i for i in range(len(chosen) + 1) if _at(chosen, i) != _at(chosen, i - 1)]
    return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _at(chosen: Sequence[bool], index: int) -> bool:
    return 0 <= index < len(chosen) and chosen[index]
