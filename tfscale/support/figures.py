"""Figures that notebooks show: the only module that imports matplotlib."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


INK = "#30343b"  # colour of text


def figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches. A notebook shows it without pyplot."""
    made: Figure = figure_class()(figsize=(width, height), layout="constrained")
    return made


def bare(axes: Any, **how: Any) -> None:
    """Hide the frame and the ticks of axes; ``how`` holds more arguments of ``tick_params``."""
    axes.tick_params(colors=INK, labelsize=8, length=0, **how)
    for side in axes.spines.values():
        side.set_visible(False)


def check_matplotlib() -> None:
    """Raise if matplotlib is missing: better now than after minutes of work."""
    figure_class()


@functools.cache
def figure_class() -> Any:
    """Return a subclass of matplotlib's figure that notebooks can show without pyplot."""
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
