"""A plot of a schedule: rate against time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tfscale.support import figures
from tfscale.support.figures import INK, bare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FAINT, _LINE = "#e3e6ea", "#3b6fb6"


def draw(
    times: np.ndarray, rates: np.ndarray, *, title: str, warmup: float, unit: str, what: str
) -> Figure:
    """Plot rates against times; a dotted line marks the end of the warm-up."""
    end = times[-1]
    figure = figures.figure(6.4, 3.2)
    axes: Any = figure.add_subplot()
    axes.plot(times, rates, color=_LINE, linewidth=1.8)
    if 0 < warmup < end:
        axes.axvline(warmup, color=INK, linewidth=0.8, linestyle=":")
    axes.grid(color=_FAINT, linewidth=0.7)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, end)
    axes.set_xlabel(unit, color=INK, fontsize=9)
    axes.set_ylabel(what, color=INK, fontsize=9)
    bare(axes)
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    return figure
