"""The result of ``MACH.fit``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class History:
    """Metrics of a training by epochs.

    Attributes:
        history: for each metric, its mean over models by epochs, as Keras's ``History`` has it.
        models: for each model, the history that Keras returned.
    """

    def __init__(self) -> None:
        self.history: dict[str, list[float]] = {}
        self.models: dict[str, Mapping[str, Sequence[float]]] = {}

    def add(self, name: str, found: Mapping[str, Sequence[float]]) -> None:
        """Add a model's history."""
        self.models[name] = found
        for metric in found:
            columns = [each[metric] for each in self.models.values() if metric in each]
            rows = range(max(map(len, columns)))
            self.history[metric] = [_mean([c[i] for c in columns if i < len(c)]) for i in rows]

    def add_metrics(self, found: Mapping[str, float]) -> None:
        """Add metrics of all models together, after the last epoch."""
        self.history.update({f"val_{name}": [value] for name, value in found.items()})


def _mean(values: Sequence[Any]) -> float:
    return float(sum(values) / len(values))
