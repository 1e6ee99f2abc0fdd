"""Figures that show themselves: the one place that asks for matplotlib."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(width: float, height: float) -> Figure:
    """An empty figure, in inches. A notebook shows it without pyplot."""
    made: Figure = figure_class()(figsize=(width, height), layout="constrained")
    return made


def check_matplotlib() -> None:
    """Better now than after minutes of work."""
    figure_class()


@functools.cache
def figure_class() -> Any:
    """Matplotlib's, which only pyplot teaches notebooks to show."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib, which is not installed: pip install matplotlib"
        ) from error

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png", dpi=100)
            return data.getvalue()

    return Shown
