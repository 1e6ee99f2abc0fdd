"""Pictures of plans and of scaling curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfscale.plan.cut import Price
from tfscale.support import figures
from tfscale.support.figures import INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tfscale.plan.scaling import Point

_PARTS = {
    "compute": "#7da7d9",
    "row": "#9ccc9c",
    "bubble": "#d9dce1",
    "sums": "#f0b27a",
    "update": "#e3a8b4",
}
_MEMORY = {
    "weights": "#7da7d9",
    "gradients": "#f0b27a",
    "state": "#9ccc9c",
    "activations": "#e3a8b4",
    "buffers": "#d9dce1",
}
_LIMITS = {"compute": "#7da7d9", "latency": "#e3a8b4", "bandwidth": "#f0b27a", "batch": INK}


def draw_prices(prices: Sequence[Price], memory: float) -> Figure:
    """Plot what the time and the memory of each cut go to.

    Args:
        prices: prices of cuts.
        memory: bytes of a device, drawn as a line.
    """
    figure = figures.figure(11.0, 1.6 + 0.45 * len(prices))
    times, sizes = figure.subplots(1, 2, sharey=True)
    names = [str(price.cut) for price in prices]
    _bars(times, names, [price.parts for price in prices], _PARTS, 1e3, "milliseconds of a step")
    held = [price.memory for price in prices]
    _bars(sizes, names, held, _MEMORY, 1e-9, "GB on the fullest device")
    sizes.axvline(memory / 1e9, color=INK, linewidth=1, linestyle="--")
    times.invert_yaxis()
    return figure


def _bars(
    axes: Any,
    names: list[str],
    values: Sequence[dict[str, float]],
    colours: dict[str, str],
    unit: float,
    title: str,
) -> None:
    left = [0.0] * len(names)
    for part, colour in colours.items():
        widths = [unit * value[part] for value in values]
        axes.barh(range(len(names)), widths, left=left, color=colour, label=part, height=0.7)
        left = [a + b for a, b in zip(left, widths)]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel(title, fontsize=8, color=INK)
    axes.tick_params(length=0, colors=INK, labelsize=8)
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def draw_curve(points: Sequence[Point], title: str) -> Figure:
    """Plot the speed-up over the number of devices, coloured by what binds there.

    Args:
        points: points of a scaling curve.
        title: title of the picture.
    """
    figure = figures.figure(6.5, 4.5)
    axes = figure.add_subplot()
    ranks = [point.ranks for point in points]
    axes.plot(ranks, ranks, color="#d9dce1", linewidth=1, label="ideal")
    axes.plot(ranks, [point.speed_up for point in points], color=INK, linewidth=1, zorder=1)
    for limit, colour in _LIMITS.items():
        found = [point for point in points if point.limit == limit]
        if found:
            axes.scatter(
                [point.ranks for point in found], [point.speed_up for point in found],
                color=colour, s=36, label=f"bound by {limit}", zorder=2,
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("devices", color=INK)
    axes.set_ylabel("speed-up", color=INK)
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.tick_params(colors=INK, labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
