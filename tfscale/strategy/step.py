"""What the replica that runs on this thread is doing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class _Step(threading.local):
    # What ``num_replicas_in_sync`` answers, if not the plain number: see share.py.
    count: Any = None
    # Whether it has been asked for.
    counted = False
    # The same as count, around a loss that has a share of its own.
    outer_count: Any = None
    # Gradients have been reduced: what follows is the same on all replicas, so
    # nothing is reduced again and variables are assigned where they are.
    reduced = False
    # Sums a window's gradients, where they are accumulated.
    window: Any = None
    # Statistics that this replica has assigned, to be averaged: see variables.py.
    statistics: list[Any] | None = None


step = _Step()


@contextlib.contextmanager
def during(**values: Any) -> Iterator[None]:
    """Set attributes of ``step`` for a while."""
    before = {name: getattr(step, name) for name in values}
    try:
        for name, value in values.items():
            setattr(step, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(step, name, value)
