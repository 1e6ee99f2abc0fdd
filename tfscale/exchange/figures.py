"""Figures of a strategy that telemetry writes, such as the number of rounds that are over."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_GIVEN: weakref.WeakKeyDictionary[Any, weakref.WeakMethod[Any]] = weakref.WeakKeyDictionary()


def give_figures(strategy: Any, figures: Callable[[], dict[str, float]]) -> None:
    """Let telemetry read figures of a strategy; ``figures`` is a bound method."""
    _GIVEN[strategy] = weakref.WeakMethod(figures)


def figures_of(strategy: Any) -> dict[str, float]:
    """Return the figures of a strategy, by name; none if it has none."""
    reference = _GIVEN.get(strategy)
    figures = None if reference is None else reference()
    return {} if figures is None else figures()
