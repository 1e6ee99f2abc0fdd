"""A bar on a terminal that says how much of a long computation is left."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(what: str, products: int, shown: bool | None) -> Iterator[Callable[[float], None]]:
    """A function that is told how many products have been made since it was last called.

    Args:
        what: is computed.
        products: how many it takes, at most.
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
        task = shows.add_task(f"{what}, products", total=products)
        yield lambda done: shows.advance(task, done)
