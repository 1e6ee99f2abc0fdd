"""Which process started this one, by its parents or theirs."""

from __future__ import annotations

import os
from pathlib import Path


def ancestor(name: str) -> str:
    """The id of the nearest one of this name; empty if there is none."""
    process = os.getppid()
    while process > 0:
        try:
            text = Path(f"/proc/{process}/stat").read_text(errors="replace")
        except OSError:
            break
        its_name, fields = text[text.index("(") + 1 : text.rindex(")")], text.rpartition(")")[2]
        if its_name == name:
            return str(process)
        process = int(fields.split()[1])
    return ""
