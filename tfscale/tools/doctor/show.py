"""The report as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfscale.tools.doctor.check import OK, PROBLEM, WARNING, Check

if TYPE_CHECKING:
    from rich.console import Console

    from tfscale.bridge.hooks import Hook

_MARKS = {OK: ("ok", "green"), WARNING: ("warning", "yellow"), PROBLEM: ("PROBLEM", "bold red")}
_MARK, _NAME = 9, 13  # columns
_WIDTH = 80  # width of a file; programs read --json


def make_console() -> Console:
    """Make the console, which leaves lines as ``line`` has wrapped them."""
    from rich.console import Console

    return Console(highlight=False, markup=False, soft_wrap=True)


def line(console: Console, check: Check) -> None:
    """Print one check, with its advice indented below it."""
    from rich.text import Text

    mark, style = _MARKS[check.state]
    width = console.width if console.is_terminal else _WIDTH
    text = Text().append(f"{mark:{_MARK}}", style).append(f"{check.name:{_NAME}}", "bold")
    text.append(_indented(check.found, _MARK + _NAME, width)[_MARK + _NAME :])
    console.print(text)
    if check.advice:
        console.print(Text(_indented(check.advice, _MARK + _NAME, width), style="italic"))


def hooks(console: Console, declared: Sequence[Hook]) -> None:
    """Print what tfscale replaces in Keras and TensorFlow, grouped by the end of the hooks."""
    from rich.text import Text

    width = console.width if console.is_terminal else _WIDTH
    console.print("tfscale replaces these attributes of Keras and TensorFlow for a while, and then")
    console.print("puts the originals back:")
    for until in dict.fromkeys(hook.until for hook in declared):
        console.print(Text(f"\nuntil {until}", style="bold"))
        for hook in declared:
            if hook.until == until:
                console.print(f"  {hook.whose}.{hook.name}")
                console.print(_indented(hook.why, _MARK, width))


def _indented(text: str, columns: int, width: int) -> str:
    margin = " " * columns
    lines = text.splitlines()
    if width <= 2 * columns:
        return "\n".join(margin + each for each in lines)
    return "\n".join(
        textwrap.fill(
            each,
            width,
            initial_indent=margin,
            subsequent_indent=margin,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for each in lines
    )


def verdict(console: Console, checks: Sequence[Check]) -> None:
    """Print the last line."""
    problems, warnings = (
        [check.name for check in checks if check.state == state] for state in (PROBLEM, WARNING)
    )
    if problems:
        console.print(f"\nTraining would fail: see {', '.join(problems)}.", style="bold red")
    elif warnings:
        console.print(f"\nTraining works; see the warnings: {', '.join(warnings)}.")
    else:
        console.print("\nAll is well.")
