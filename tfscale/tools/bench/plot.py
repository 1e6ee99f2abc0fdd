"""Picture of the results: time against size, one panel for each number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfscale.support import figures
from tfscale.support.figures import INK, bare
from tfscale.tools.bench.table import AllReduceResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAINT = "#e3e6ea"
_COLOURS = ["#3b6fb6", "#e07b39", "#3f9c6c", "#c9485b", "#8460b5", "#c9a227", "#3aa6b9", "#d67ab1"]
_STOCK = {
    "tf": INK,
    "gloo": "#7a808a",
    "mpi": "#a9aeb6",
    "horovod": "#c9ced4",
    "nothing": "#dfe3e8",
}
_STOCK_MARKERS = {"tf": "X", "gloo": "^", "mpi": "v"}
_STYLES = ["-", "--", "-.", ":"]
_MARKERS = ["o", "s", "D", "P", "*", "h", "d", "p"]


def draw(records: Sequence[AllReduceResult], title: str) -> Figure:
    """Draw results: colours show algorithms, lines and markers show wires, grey shows the bound."""
    counts = list(dict.fromkeys(record.processes for record in records))
    figure = figures.figure(1.9 + 4.6 * len(counts), 5.0)
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for panel, processes in zip(panels, counts, strict=True):
        shown = [record for record in records if record.processes == processes]
        _draw_panel(panel, shown)
        panel.set_title(f"{processes} processes", loc="left", fontsize=10, color=INK)
        panel.set_xlabel("float32 numbers", fontsize=9, color=INK)
    times = [record.median_ms for record in records]
    panels[0].set_ylim(min(times) / 2, max(times) * 2)
    panels[0].set_ylabel("ms per all-reduce (median)", fontsize=9, color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside right center", frameon=False, fontsize=8, labelcolor=INK
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=INK)
    return figure


def _draw_panel(panel: Any, records: Sequence[AllReduceResult]) -> None:
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.grid(color=FAINT, linewidth=0.7)
    bare(panel, which="both")
    algorithms = list(dict.fromkeys(r.algorithm for r in records if r.algorithm not in _STOCK))
    wires = list(dict.fromkeys(record.wire for record in records))
    for name in dict.fromkeys(record.contestant for record in records):
        line = sorted((r for r in records if r.contestant == name), key=lambda r: r.numbers)
        wire = wires.index(line[0].wire)
        colour = _STOCK.get(line[0].algorithm)
        panel.plot(
            [r.numbers for r in line],
            [r.median_ms for r in line],
            color=colour or _COLOURS[algorithms.index(line[0].algorithm) % len(_COLOURS)],
            linestyle=_STYLES[wire % len(_STYLES)],
            marker=_STOCK_MARKERS.get(line[0].algorithm) or _MARKERS[wire % len(_MARKERS)],
            markersize=5,
            linewidth=2.2 if colour else 1.5,
            label=name,
        )
    for number, wire_name in enumerate(wires):
        _draw_bound(panel, [r for r in records if r.wire == wire_name], wire_name, number)


def _draw_bound(panel: Any, records: Sequence[AllReduceResult], wire: str, number: int) -> None:
    line = sorted({(r.numbers, r.bound_ms) for r in records})
    panel.plot(
        [x for x, _ in line],
        [y for _, y in line],
        color="#b9bec6",
        linewidth=4,
        alpha=0.7,
        linestyle=_STYLES[number % len(_STYLES)],
        zorder=0,
        label=f"bound {wire}",
    )
