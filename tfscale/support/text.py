"""Text and tables on lines of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 80


def wrapped(words: str) -> str:
    """Wrap a text without breaking words."""
    return textwrap.fill(
        words, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def entries(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Format rows: for each a line of words, and below it the row's cells, in columns.

    Args:
        columns: the titles of the columns.
        rows: words and cells of each row.
    """
    lines = [columns, *(cells for _, cells in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]

    def aligned(cells: Sequence[str]) -> str:
        return "    " + "  ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))

    each = [f"{wrapped(words)}\n{aligned(cells)}" for words, cells in rows]
    return "\n".join([aligned(columns), *each])
