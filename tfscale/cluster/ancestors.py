"""The processes that started this one: parents, and their parents."""

from __future__ import annotations

import os
from pathlib import Path


def ancestor(name: str) -> str:
    """Return the id of the nearest ancestor of this name; empty if there is none."""
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
