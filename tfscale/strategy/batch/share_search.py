"""Search for the shares with which all replicas finish their steps together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from tfscale.strategy.batch.shares import weights_for

FIRST_WINDOW, LAST_WINDOW = 10, 160  # steps that are measured before a decision
WORTHWHILE = 0.05  # share of a step's time that a change must save, in two windows
_MOVED = 0.05  # change of a number of rows that is enough to measure what a row costs
_LEAST, _MOST = 0.33, 4.0  # limits of a row's cost, as multiples of the mean of all rows


@dataclasses.dataclass(frozen=True)
class Window:
    """Sums over some steps, for each rank.

    Attributes:
        steps: number of steps.
        rows: rows that each rank has taken.
        busy: microseconds in which each rank has computed.
    """

    steps: int
    rows: np.ndarray
    busy: np.ndarray

    def __add__(self, other: Window) -> Window:
        return Window(self.steps + other.steps, self.rows + other.rows, self.busy + other.busy)

    @property
    def is_measured(self) -> bool:
        """Whether each rank has computed rows."""
        return bool(self.rows.all() and self.busy.all())

    @property
    def rows_of_step(self) -> np.ndarray:
        """Rows that each rank has taken, on average in a step."""
        return self.rows / self.steps

    @property
    def seconds(self) -> np.ndarray:
        """Seconds in which each rank has computed, on average in a step."""
        return self.busy / self.steps / 1e6

    @property
    def longest(self) -> float:
        """Seconds of the slowest rank, on average in a step."""
        return float(self.seconds.max())


@dataclasses.dataclass(frozen=True)
class Found:
    """Shares that the search has found.

    Attributes:
        weights: whole numbers in proportion to the rows of each rank.
        window: measured steps before the change.
        saves: share of a step's time that the change saves.
    """

    weights: list[int]
    window: Window
    saves: float


class ShareSearch:
    """Search for the shares with which all ranks finish together.

    At first a rank's time is taken to be in proportion to its rows. After a change, it is taken to
    be a line through what was measured before and after. But times may jump: a kernel that limits a
    process to half a core stops it for the rest of each tenth of a second, unless the process has
    computed its rows before. Then a line leads too far, and the next line leads back. So if a
    change makes steps longer, the search returns to the best shares, and measures longer before it
    tries again.

    Args:
        rows_of: returns how many of a batch's rows each rank takes with some weights.

    Attributes:
        rows_of: the function that was given.
        length: number of steps of the next window.
    """

    def __init__(self, rows_of: Callable[[np.ndarray, int], np.ndarray]) -> None:
        self.rows_of = rows_of
        self.length = FIRST_WINDOW
        self._last: Window | None = None
        self._before: Window | None = None  # measured with other shares
        self._best: list[int] | None = None
        self._seconds_of_best = np.inf
        self._failures = 0

    @property
    def is_new(self) -> bool:
        """Whether no window has been measured since the last change."""
        return self._last is None

    def decide(self, window: Window, weights: list[int]) -> Found | None:
        """Return better shares, or None if these are to stay.

        Two windows must agree, so that shares do not follow noise.

        Args:
            window: steps that were measured with some shares.
            weights: these shares.
        """
        last, self._last = self._last, window
        if last is None:
            return None
        windows = [window + last, window, last]
        if self._best is not None and self._best != weights:
            saves = min(1 - self._seconds_of_best / one.longest for one in windows)
            if saves > WORTHWHILE:
                self._failures += 1
                self._seconds_of_best = np.inf  # measured anew, since machines change
                return self._changed(Found(self._best, windows[0], saves))
        self._best, self._seconds_of_best = weights, windows[0].longest
        made, saves = self.wanted(weights, windows[0])
        saved = [self.wanted(weights, one)[1] for one in windows[1:]]
        if min(saves, *saved) > WORTHWHILE:
            return self._changed(Found(made, windows[0], saves))
        if min(saves, saved[0]) <= WORTHWHILE:
            self.length = min(2 * self.length, LAST_WINDOW)
        return None

    def wanted(self, weights: list[int], window: Window) -> tuple[list[int], float]:
        """Return the weights with which all ranks finish together, and the share of time they save.

        Args:
            weights: the weights with which the window was measured.
            window: measured steps.
        """
        if not window.is_measured:
            return weights, 0.0
        rows, seconds = window.rows_of_step, window.seconds
        costs = self._costs_of_a_row(window)
        together = (seconds / costs).sum() / (1 / costs).sum()
        made = weights_for(np.maximum(rows + (together - seconds) / costs, 0.5).tolist())
        taken = self.rows_of(np.array(made), round(rows.sum()))
        after = (seconds + costs * (taken - rows)).max()
        return made, float(1 - after / window.longest)

    def _costs_of_a_row(self, window: Window) -> np.ndarray:
        """Return how many seconds one more row costs each rank."""
        rows, seconds, before = window.rows_of_step, window.seconds, self._before
        means: np.ndarray = seconds / rows
        if before is None or not before.is_measured:
            return means
        more = rows - before.rows_of_step
        is_moved = abs(more) > _MOVED * rows
        slopes = (seconds - before.seconds) / np.where(is_moved, more, 1)
        found: np.ndarray = np.clip(slopes, _LEAST * means, _MOST * means)
        return np.where(is_moved, found, means)

    def _changed(self, found: Found) -> Found:
        self._last, self._before = None, found.window
        self.length = min(FIRST_WINDOW * 2**self._failures, LAST_WINDOW)
        return found
