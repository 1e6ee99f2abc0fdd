"""Telemetry as a table and as a plot."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tfscale.analysis.telemetry.errors import Distortion
from tfscale.analysis.telemetry.steps import EFFICIENCIES, Mean
from tfscale.support import figures
from tfscale.support.figures import INK, bare
from tfscale.support.text import WIDTH, entries, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tfscale.exchange.explain import Row
    from tfscale.native import BucketId

_WORDS = {
    "step_ms": "a step, ms",
    "samples_per_second": "samples per second",
    "communication_ms": "in communication per step, ms",
    "exposed_ms": "exposed per step, ms",
    "sent_mb": "sent per step, MB",
    "saved_mb": "saved per step, MB",
}


def summary(
    whole: Mean,
    numbers: Mapping[str, float],
    efficiency: str,
    rows: Iterable[Row],
    distortions: Mapping[BucketId, Distortion],
    words: str,
) -> str:
    """Return the text of two tables.

    Args:
        whole: sums over all intervals.
        numbers: means over usual intervals.
        efficiency: the reference of the scaling efficiency.
        rows: the buckets, with their present schedules.
        distortions: errors by bucket.
        words: a text to add.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title="telemetry", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("steps", f"{whole.steps:,}")
    for name, value in numbers.items():
        shown = f"{value:.1%}" if name in EFFICIENCIES else f"{value:,.4g}"
        table.add_row(_WORDS.get(name) or f"scaling efficiency, {efficiency}", shown)
    for name in ("sent", "saved"):
        if name in whole.counted:
            table.add_row(f"{name} in all, MB", f"{whole.counted[name] / 1e6:,.4g}")
    text = io.StringIO()
    Console(file=text, width=WIDTH).print(table)
    buckets = [_bucket(row, distortions.get(row.bucket)) for row in rows]
    if buckets:
        print(entries(("bytes", "wire", "of fp32", "error"), buckets), file=text)
    if words:
        print(wrapped(words), file=text)
    return text.getvalue()


def _bucket(row: Row, distortion: Distortion | None) -> tuple[str, tuple[str, ...]]:
    error = (
        "-"
        if distortion is None
        else f"{'' if distortion.measured else '<= '}{distortion.error:.2g}"
    )
    share = f"{row.bytes / row.lossless:.0%}" if row.lossless else "-"
    return row.words, (f"{row.bytes:,}", row.wire, share, error)


_FAINT = "#e3e6ea"
_PANELS = (
    ("samples per second", ("samples_per_second",)),
    ("ms per step", ("step_ms", "communication_ms", "exposed_ms")),
    ("MB per step", ("sent_mb", "saved_mb")),
)


def draw(points: Sequence[Mapping[str, float]], unusual: Sequence[Mapping[str, float]]) -> Figure:
    """Plot rates, times and bytes against steps.

    Args:
        points: numbers by step.
        unusual: numbers of steps in which a graph was traced or a profiler ran. Such steps take
            many times as long as the others, so a text lists them, and the axes fit the others.
    """
    shown = [(title, [n for n in names if any(n in p for p in points)]) for title, names in _PANELS]
    shown = [(title, names) for title, names in shown if names]
    figure = figures.figure(7.0, 0.6 + 2.0 * max(1, len(shown)))
    panels = figure.subplots(max(1, len(shown)), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (title, names) in zip(panels, shown, strict=False):
        for name in names:
            known = [(point["step"], point[name]) for point in points if name in point]
            panel.plot(*zip(*known, strict=True), label=name, linewidth=1.5, marker=".")
        panel.set_title(title, loc="left", fontsize=9, color=INK)
        panel.set_ylim(bottom=0)
        panel.grid(color=_FAINT, linewidth=0.7)
        bare(panel)
        panel.legend(frameon=False, fontsize=8)
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    panels[-1].set_xlabel(_axis_label(unusual), fontsize=8, color=INK)
    return figure


def _axis_label(unusual: Sequence[Mapping[str, float]]) -> str:
    left_out = [
        f"up to step {p['step']:,}: {p['step_ms']:,.0f} ms" for p in unusual if "step_ms" in p
    ]
    if not left_out:
        return "step"
    return f"step\nnot drawn, because a graph was traced or a profiler ran: {'; '.join(left_out)}"
