"""Picture of the results of ``tfscale bench fit``: one panel for each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfscale.support import figures
from tfscale.support.figures import INK, bare
from tfscale.tools.bench.fit_table import FitResult
from tfscale.tools.bench.plot import FAINT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIRST, _OTHERS = "#a9aeb6", "#3b6fb6"


def draw(records: Sequence[FitResult]) -> Figure:
    """Draw bars of steps per second; grey is the first of a group, the baseline."""
    groups: dict[tuple[str, int, int], list[FitResult]] = {}
    for record in records:
        groups.setdefault((record.part, record.processes, record.devices), []).append(record)
    figure = figures.figure(8.0, 0.6 + sum(0.8 + 0.3 * len(g) for g in groups.values()))
    sizes = [1 + len(group) for group in groups.values()]
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=sizes)[:, 0]
    for panel, ((part, processes, devices), group) in zip(panels, groups.items(), strict=True):
        colours = [_FIRST, *[_OTHERS] * (len(group) - 1)]
        bars = panel.barh(
            [r.contestant for r in group], [r.steps_per_second for r in group], color=colours
        )
        panel.bar_label(bars, [f"{r.times:.2f}x" for r in group], padding=4, fontsize=8, color=INK)
        panel.invert_yaxis()
        panel.margins(x=0.1)
        panel.grid(axis="x", color=FAINT, linewidth=0.7)
        panel.set_axisbelow(True)
        bare(panel)
        panel.set_title(f"{part}, {processes}x{devices}: steps per second", loc="left",
                        fontsize=9, color=INK)  # fmt: skip
    return figure
