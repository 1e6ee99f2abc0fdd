"""Space-time diagrams of schedules, which show why one is faster than another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfscale.collectives.cost import Link, Machine
from tfscale.collectives.programs import Programs
from tfscale.collectives.simulate import Message, Simulation, simulate
from tfscale.support import figures
from tfscale.support.figures import INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LANE = 0.25  # half the height of a bar; the lines of two ranks are 1 apart
_DEFAULT = Link(1.0, 8.0)
_FAINT = "#d9dce1"


def draw(schedule: Programs, machine: Machine | None = None, nbytes: float = 1.0) -> Figure:
    """Plot a simulation: time to the right, one line per rank.

    A bar on a rank's line is a message that leaves, striped in the colours of its chunks: pale for
    a partial sum, full for final bytes. A thin line leads to the receiver at the moment of arrival,
    dashed for a partial sum. A diamond marks an owner that finalises its chunks.

    Args:
        schedule: any schedule; up to 16 ranks are easy to read.
        machine: a machine; by default links on which the buffer takes eight empty messages' time.
        nbytes: size of the buffer.
    """
    link = machine or _DEFAULT
    seen = simulate(schedule, nbytes, link, messages=True)
    height = 1.5 + 0.36 * schedule.ranks
    figure = figures.figure(8.0, height)
    axes = figure.add_subplot()
    colour = _palette(schedule.chunks)
    end = seen.seconds or 1.0
    for rank in range(schedule.ranks):
        axes.axhline(rank, color=_FAINT, linewidth=1, zorder=0)
    for message in sorted(seen.messages, key=lambda message: message.left):
        _draw_message(axes, message, link, nbytes / schedule.chunks, colour)
    _draw_owners(axes, seen, colour)

    axes.set_xlim(-0.02 * end, 1.02 * end)
    axes.set_ylim(schedule.ranks - 0.35, -0.65)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.tick_params(length=0, colors=INK, labelsize=8)
    scale = "seconds" if machine else "time (an empty message takes 1, the whole buffer 1 + 8)"
    axes.set_xlabel(scale, color=INK, fontsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.set_title(_caption(schedule, seen, nbytes), loc="left", color=INK, fontsize=10)
    _add_legend(figure, colour)
    return figure


def _draw_message(
    axes: Any, message: Message, machine: Machine, chunk: float, colour: Callable[[int], Any]
) -> None:
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    group = [] if isinstance(machine, Link) else _groups(machine.sizes)
    if isinstance(machine, Link):
        link = machine
    else:
        same = group[message.sender] == group[message.receiver]
        link = machine.inner if same else machine.outer
    chunks = range(message.first, message.last)
    width = link.seconds(len(chunks) * chunk)
    strength = 0.95 if message.final else 0.42
    middle = colour(chunks[len(chunks) // 2])
    for number, each in enumerate(chunks):
        stripe = 2 * _LANE / len(chunks)
        corner = (message.left, message.sender - _LANE + number * stripe)
        axes.add_patch(
            Rectangle(corner, width, stripe, facecolor=colour(each), alpha=strength, linewidth=0)
        )
    axes.add_patch(
        Rectangle(
            (message.left, message.sender - _LANE), width, 2 * _LANE, fill=False,
            edgecolor="white", linewidth=0.8,
        )
    )  # fmt: skip
    axes.annotate(
        "",
        xy=(message.arrived, message.receiver),
        xytext=(message.left + width / 2, message.sender),
        arrowprops={
            "arrowstyle": "-|>,head_width=0.14,head_length=0.28",
            "color": middle,
            "linewidth": 0.9,
            "path_effects": [withStroke(linewidth=2.4, foreground="white")],
            "linestyle": "-" if message.final else (0, (3, 2)),
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )


def _draw_owners(axes: Any, seen: Simulation, colour: Callable[[int], Any]) -> None:
    for final in seen.finalised:
        axes.plot(
            final.time, final.rank, marker="D", markersize=6, markeredgecolor=INK,
            markerfacecolor=colour(final.first), markeredgewidth=1.0, zorder=5, clip_on=False,
        )  # fmt: skip


def _add_legend(figure: Any, colour: Callable[[int], Any]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    diamond: dict[str, Any] = {
        "marker": "D",
        "linestyle": "",
        "markersize": 5,
        "markeredgecolor": INK,
    }
    figure.legend(
        handles=[
            Patch(facecolor=colour(0), alpha=0.42, label="sends a partial sum"),
            Patch(facecolor=colour(0), alpha=0.95, label="sends final bytes"),
            Line2D([], [], markerfacecolor=colour(0), label="owner finalises", **diamond),
        ],
        loc="outside lower right",
        ncols=3,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
    )


def _caption(schedule: Programs, seen: Simulation, nbytes: float) -> str:
    sent = max(seen.sent) / nbytes
    chunks = "1 chunk" if schedule.chunks == 1 else f"{schedule.chunks} chunks"
    rounds = "" if schedule.cost is None else f"{schedule.cost.rounds} rounds; "
    return (
        f"{schedule.name}, {schedule.ranks} ranks, {chunks}: {rounds}"
        f"the busiest rank sends {sent:.4g} x the buffer; time {seen.seconds:.4g}"
    )


def _palette(chunks: int) -> Callable[[int], Any]:
    """Return distinct colours of chunks; neighbours in the ring of chunks get similar colours."""
    from matplotlib import colormaps

    if chunks <= 8:
        few = [
            "#3b6fb6",
            "#e07b39",
            "#3f9c6c",
            "#c9485b",
            "#8460b5",
            "#c9a227",
            "#3aa6b9",
            "#d67ab1",
        ]
        return lambda chunk: few[chunk]
    return lambda chunk: colormaps["turbo"](0.06 + 0.88 * chunk / (chunks - 1))


def _groups(sizes: Any) -> list[int]:
    return [number for number, size in enumerate(sizes) for _ in range(size)]
