"""A bar on a terminal that says how much of a long computation is left."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(what: str, steps: int, shown: bool | None) -> Iterator[Callable[[float], None]]:
    """A function that is told how many steps have been made since it was last called.

    Args:
        what: is computed, and what its steps are.
        steps: how many it takes, at most.
        shown: whether to show anything; None means if stderr is a terminal.
    """
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shows:
        task = shows.add_task(what, total=steps)
        yield lambda done: shows.advance(task, done)
