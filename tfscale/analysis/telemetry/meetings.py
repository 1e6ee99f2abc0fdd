"""Comparison of workers while they train: they meet now and then, and tell each other their steps.

All workers must meet at the same steps, because each waits for all others there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tfscale.analysis.telemetry.steps import Window
from tfscale.analysis.telemetry.stragglers import Steps, Stragglers, compared, name_of, steps_of

MOST = 128  # steps that a worker tells at once
KEPT = 1000  # steps that are compared
FIRST, RAREST = 50, 1000  # steps of fit between two meetings: they become rarer

Tell = Callable[[np.ndarray], np.ndarray]  # returns the arrays of all workers


class Meetings:
    """The steps of all workers of a training, as far as they have told each other.

    Args:
        tell: gives this worker's array to all others, and returns the arrays of all.
        ranks: numbers of the ranks of each worker.
    """

    def __init__(self, tell: Tell, ranks: Sequence[Sequence[int]]) -> None:
        self._tell = tell
        self._workers = [name_of(each) for each in ranks]
        self._fresh: dict[int, Sequence[float]] = {}
        self._known: list[dict[int, Sequence[float]]] = [{} for _ in ranks]
        self._due = self._pause = FIRST

    def add(self, windows: Sequence[Window]) -> None:
        """Note intervals of this worker."""
        self._fresh.update(
            steps_of({**vars(window), "seconds": window.seconds} for window in windows)
        )

    def are_due(self, steps: int) -> bool:
        """Return whether workers meet before a step of ``fit``, which all of them count alike."""
        if steps < self._due:
            return False
        self._pause = min(2 * self._pause, RAREST)
        self._due = steps + self._pause
        return True

    def meet(self) -> Stragglers | None:
        """Exchange the last steps with all workers, and return who waits for whom."""
        own = np.full([MOST, 4], -1.0)
        for row, step in zip(own, sorted(self._fresh)[-MOST:]):
            row[:] = step, *self._fresh[step]
        self._fresh = {}
        for known, rows in zip(self._known, self._tell(own), strict=True):
            known.update({int(row[0]): row[1:].tolist() for row in rows if row[0] >= 0})
            for step in sorted(known)[:-KEPT]:
                del known[step]
        steps: Sequence[Steps] = self._known
        return compared(self._workers, steps)
