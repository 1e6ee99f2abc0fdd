"""Numbers of plans in words."""

from __future__ import annotations

import math
from collections.abc import Callable


def show(size: float, to: Callable[[float], float] = round) -> str:
    """Return a number of bytes for people.

    Args:
        size: the number.
        to: rounds to a whole number; ``math.ceil`` makes the result not smaller than the number.
    """
    for factor, unit, digits in ((1e9, "GB", 2), (1e6, "MB", 1), (1e3, "kB", 1)):
        if size >= factor:
            return f"{to(size / factor * 10**digits) / 10**digits:.{digits}f} {unit}"
    return f"{to(size)} bytes"


def rounded_up(share: float) -> str:
    """Return a share with two digits that is not smaller."""
    return f"{math.ceil(share * 100) / 100:.2f}"
