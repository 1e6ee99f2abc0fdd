"""Numbers of plans in words."""

from __future__ import annotations

import math


def show(size: float) -> str:
    """Return a number of bytes for people."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{size:.0f} bytes"


def rounded_up(share: float) -> str:
    """Return a share with two digits that is not smaller."""
    return f"{math.ceil(share * 100) / 100:.2f}"
