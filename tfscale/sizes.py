"""Numbers of bytes, as people write them."""

from __future__ import annotations

import re

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_WORDS = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?)(I?)(?:B|bytes)?\s*", re.IGNORECASE)


def number_of_bytes(value: float | str, name: str) -> int:
    """Bytes in ``25_000_000``, ``"25MB"`` (of 1000 KB) or ``"25MiB"`` (of 1024 KiB).

    Args:
        value: what the user gave.
        name: of the argument, for the error.
    """
    words = None if isinstance(value, bool) else _WORDS.fullmatch(str(value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        size = float(value)
    elif isinstance(value, str) and words and (words[2] or not words[3]):
        size = float(words[1]) * (1024 if words[3] else 1000) ** _POWERS[words[2].upper()]
    else:
        size = 0.0
    if not 1 <= size < float("inf"):
        raise ValueError(
            f"{name} is a number of bytes, 1 or more, such as 25_000_000, '25MB' or '24MiB'; "
            f"got {value!r}"
        )
    return int(size)
