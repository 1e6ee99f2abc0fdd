"""The demo's picture: what each training learned, and the bytes that it sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfscale.support import figures
from tfscale.support.figures import INK
from tfscale.tools.bench.table import short
from tfscale.tools.demo.training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The curve of one device is wide, because the others lie on top of it.
_STYLES = [
    {"color": "#c9ced6", "linewidth": 7},
    {"color": "#1f4e8c", "linewidth": 2},
    {"color": "#e07a3f", "linewidth": 2, "linestyle": "--"},
]


def draw(trainings: Sequence[Training]) -> Figure:
    """Plot loss and accuracy by epoch, and bytes sent."""
    figure = figures.figure(13.0, 3.8)
    left, middle, right = figure.subplots(1, 3)
    _curves(left, trainings, "loss", "loss (training images)")
    left.set_yscale("log")
    left.legend(frameon=False, labelcolor=INK)
    _curves(middle, trainings, "val_accuracy", "accuracy (other images)")
    middle.yaxis.set_major_formatter("{x:.1%}")
    _bars(right, [training for training in trainings if training.sent])
    for panel in (left, middle, right):
        panel.tick_params(colors=INK, labelsize=9)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    return figure


def _curves(panel: Any, trainings: Sequence[Training], what: str, title: str) -> None:
    for training, style in zip(trainings, _STYLES, strict=True):
        numbers = [epoch[what] for epoch in training.epochs]
        panel.plot(range(1, len(numbers) + 1), numbers, label=training.label, **style)
    panel.set_title(title, loc="left", fontsize=10, color=INK)
    panel.set_xlabel("epoch", color=INK)
    panel.xaxis.get_major_locator().set_params(integer=True)


def _bars(panel: Any, trainings: Sequence[Training]) -> None:
    sent = [training.sent / 1e6 for training in trainings]
    colors = [style["color"] for style in _STYLES[-len(trainings) :]]
    bars = panel.bar([training.label for training in trainings], sent, 0.5, color=colors)
    panel.bar_label(bars, [short(number) for number in sent], color=INK, padding=2)
    panel.set_title("MB sent by all replicas", loc="left", fontsize=10, color=INK)
    panel.set_yticks([])
    panel.spines["left"].set_visible(False)
    panel.margins(y=0.12)
