"""A progress bar on a terminal for long computations."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(what: str, steps: int, shown: bool | None) -> Iterator[Callable[[float], None]]:
    """Show a progress bar; yield a function that takes the number of steps since its last call.

    Args:
        what: name of the computation and of its steps.
        steps: largest number of steps.
        shown: whether to show the bar; None means if stderr is a terminal.
    """
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn as Remaining,
    )

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shows:
        task = shows.add_task(what, total=steps)
        yield lambda done: shows.advance(task, done)
