"""What telemetry says to people: a table and a picture."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfscale.telemetry.errors import Loss
from tfscale.telemetry.steps import Mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tfscale.strategy.explain import Row

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
    losses: Mapping[str, Loss],
    words: str,
) -> str:
    """Text of two tables.

    Args:
        whole: all turns.
        numbers: of the usual ones.
        efficiency: what the scaling efficiency is measured against.
        rows: the buckets as they travel now.
        losses: by bucket.
        words: to be said besides.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title="telemetry", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("steps", f"{whole.steps:,}")
    for name, value in numbers.items():
        said = f"scaling efficiency, {efficiency}" if name == "efficiency" else _WORDS[name]
        table.add_row(said, f"{value:.1%}" if name == "efficiency" else f"{value:,.4g}")
    for name in ("sent", "saved"):
        if name in whole.counted:
            table.add_row(f"{name} in all, MB", f"{whole.counted[name] / 1e6:,.4g}")
    text = io.StringIO()
    console = Console(file=text, width=100)
    console.print(table)
    buckets = _buckets(rows, losses)
    if buckets.row_count:
        console.print(buckets)
    if words:
        console.print(words, markup=False, highlight=False)
    return text.getvalue()


def _buckets(rows: Iterable[Row], losses: Mapping[str, Loss]) -> Any:
    from rich.table import Table

    table = Table(title="buckets")
    for heading in ("bucket", "wire", "schedule", "why", "bytes", "of fp32", "error"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        loss = losses.get(row.bucket)
        error = "-" if loss is None else f"{'' if loss.measured else '<= '}{loss.error:.2g}"
        share = f"{row.bytes / row.lossless:.0%}"
        table.add_row(row.bucket, row.wire, row.algorithm, row.why, f"{row.bytes:,}", share, error)
    return table


_INK, _FAINT = "#30343b", "#e3e6ea"
_PANELS = (
    ("samples per second", ("samples_per_second",)),
    ("ms per step", ("step_ms", "communication_ms", "exposed_ms")),
    ("MB per step", ("sent_mb", "saved_mb")),
)


def draw(points: Sequence[Mapping[str, float]]) -> Figure:
    """Rates, times and bytes against steps."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing needs matplotlib, which is not installed: pip install tfscale[plot]"
        ) from error

    shown = [(title, [n for n in names if any(n in p for p in points)]) for title, names in _PANELS]
    shown = [(title, names) for title, names in shown if names]
    figure = Figure(figsize=(7.0, 0.6 + 2.0 * max(1, len(shown))), layout="constrained")
    panels = figure.subplots(max(1, len(shown)), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (title, names) in zip(panels, shown, strict=False):
        for name in names:
            known = [(point["step"], point[name]) for point in points if name in point]
            panel.plot(*zip(*known, strict=True), label=name, linewidth=1.5, marker=".")
        panel.set_title(title, loc="left", fontsize=9, color=_INK)
        panel.set_ylim(bottom=0)
        panel.grid(color=_FAINT, linewidth=0.7)
        panel.tick_params(colors=_INK, labelsize=8, length=0)
        panel.legend(frameon=False, fontsize=8)
        for side in panel.spines.values():
            side.set_visible(False)
    panels[-1].set_xlabel("step", fontsize=8, color=_INK)
    return figure
