"""Tables for people, on lines of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 80


def wrapped(words: str, indent: str = "") -> str:
    """Words on lines that are short enough, none of them broken."""
    return textwrap.fill(
        words, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def entries(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A line of words for each row, and below it the row's cells, in columns.

    Args:
        columns: what stands above the cells.
        rows: words and cells of each.
    """
    lines = [columns, *(cells for _, cells in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]

    def aligned(cells: Sequence[str]) -> str:
        return "    " + "  ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))

    each = [f"{wrapped(words)}\n{aligned(cells)}" for words, cells in rows]
    return "\n".join([aligned(columns), *each])
