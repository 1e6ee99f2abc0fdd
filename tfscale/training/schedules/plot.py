"""A plot of a schedule: rate against time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tfscale.support import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tfscale.training.schedules.schedule import Schedule

_INK, _FAINT, _LINE = "#30343b", "#e3e6ea", "#3b6fb6"
_POINTS = 2001


def draw(schedule: Schedule, until: float | None) -> Figure:
    """Plot the rate from 0 to a time; a dotted line marks the end of the warm-up."""
    end = schedule.horizon if until is None else until
    times = np.linspace(0.0, end, _POINTS)
    figure = figures.figure(6.4, 3.2)
    axes: Any = figure.add_subplot()
    axes.plot(times, schedule.at_time(times).numpy(), color=_LINE, linewidth=1.8)
    if 0 < schedule.warmup < end:
        axes.axvline(schedule.warmup, color=_INK, linewidth=0.8, linestyle=":")
    axes.grid(color=_FAINT, linewidth=0.7)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, end)
    axes.set_xlabel(schedule.unit, color=_INK, fontsize=9)
    batch = "" if schedule.base_batch is None else f" for a batch of {schedule.base_batch}"
    axes.set_ylabel(f"learning rate{batch}", color=_INK, fontsize=9)
    axes.tick_params(colors=_INK, labelsize=8, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title(type(schedule).__name__, loc="left", color=_INK, fontsize=10)
    return figure
