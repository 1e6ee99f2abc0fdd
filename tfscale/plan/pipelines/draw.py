"""Pictures of pipelines' orders, as papers print them: one box per turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfscale.plan.pipelines.simulate import Box, Simulation, Times, simulate
from tfscale.plan.pipelines.turns import Turns, Work
from tfscale.plan.pipelines.verify import verify
from tfscale.support import figures
from tfscale.support.figures import INK, bare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    Work.FORWARD: "#7da7d9",
    Work.BACKWARD: "#f0b27a",
    Work.BACKWARD_INPUT: "#f6d186",
    Work.BACKWARD_WEIGHT: "#9ccc9c",
}
_WORDS = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.BACKWARD_INPUT: "backward, input",
    Work.BACKWARD_WEIGHT: "backward, weights",
}
_MOST_NUMBERED = 800  # boxes; more numbers than that cannot be read


def draw(order: Turns, times: Times | None = None) -> Figure:
    """Plot an order: time to the right, one line per rank, one numbered box per turn.

    A dark number is of the first stage that the rank holds, a white number of a later one. Boxes of
    turns that run at the same time lie above each other.

    Args:
        order: any order; up to 16 ranks are easy to read.
        times: times of one microbatch; by default all three kinds of work take the same time.
    """
    seen = simulate(order, times, boxes=True)
    width = min(16.0, max(7.5, 1.5 + 0.2 * max(map(len, order.turns))))
    figure = figures.figure(width, 1.4 + 0.34 * order.ranks)
    axes = figure.add_subplot()
    first = [min(turn.stage for turn in turns) for turns in order.turns]
    for box in seen.boxes:
        _draw_box(axes, box, box.turn.stage == first[box.rank], len(seen.boxes) <= _MOST_NUMBERED)
    axes.set_xlim(0, seen.seconds)
    axes.set_ylim(order.ranks - 0.45, -0.55)
    axes.set_yticks(range(order.ranks), [f"rank {rank}" for rank in range(order.ranks)])
    bare(axes)
    axes.set_facecolor("#eef0f3")
    axes.set_title(_caption(order, seen), loc="left", color=INK, fontsize=9)
    _add_legend(figure, {box.turn.work for box in seen.boxes})
    return figure


def _draw_box(axes: Any, box: Box, first: bool, numbered: bool) -> None:
    from matplotlib.patches import Rectangle

    shared = box.turn.with_next
    bottom, height = box.rank - 0.4, 0.4 if shared else 0.8
    axes.add_patch(
        Rectangle(
            (box.start, bottom), box.end - box.start, height, linewidth=0.6, edgecolor="white",
            facecolor=_COLOURS[box.turn.work], zorder=2 if shared else 1,
        )
    )  # fmt: skip
    if numbered:
        axes.text(
            (box.start + box.end) / 2, bottom + height / 2, str(box.turn.microbatch), ha="center",
            va="center", fontsize=6, color=INK if first else "white", zorder=3, clip_on=True,
        )  # fmt: skip


def _add_legend(figure: Any, works: set[Work]) -> None:
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(facecolor=_COLOURS[w], label=_WORDS[w]) for w in Work if w in works],
        loc="outside lower right", ncols=4, frameon=False, fontsize=8, labelcolor=INK,
    )  # fmt: skip


def _caption(order: Turns, seen: Simulation) -> str:
    live = float(max(verify(order).live))
    return (
        f"{order.name}, {order.ranks} ranks, {order.microbatches} microbatches: "
        f"idle {seen.idle_share:.0%} of the time, at most {live:.3g} live activations"
    )
