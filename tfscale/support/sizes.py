"""Parsing of numbers of bytes, and of shares."""

from __future__ import annotations

import re
from typing import Any

from tfscale.support import arguments

_POWERS: dict[str, int] = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SHARE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*")
_MOST = 1e18
_WORDS = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(?:([KMGT])(I?))?(?:B|bytes)?\s*", re.IGNORECASE)


def number_of_bytes(value: float | str, name: str) -> int:
    """Return the bytes of ``25_000_000``, ``"25MB"`` (1 MB is 1000 KB) or ``"25MiB"`` (1024 KiB).

    Args:
        value: the user's value.
        name: name of the argument, for the error.
    """
    size = _size(value)
    if not 1 <= size <= arguments.LARGEST:
        expected = "a number of bytes, 1 or more, such as 25_000_000, '25MB' or '24MiB'"
        raise arguments.wrong(value, name, expected)
    return int(size)


def _size(value: Any) -> float:
    """Return a size, or 0 if the value is not a size."""
    if arguments.is_number(value):
        return value  # type: ignore[no-any-return]
    words = _WORDS.fullmatch(value) if isinstance(value, str) else None
    if words is None:
        return 0
    number, letter, binary = words.groups("")
    unit = 1024.0 if binary else 1000.0
    return float(number) * unit ** _POWERS[letter.upper()]


def amount(value: Any, name: str, expected: str, whole: float, is_bytes: bool = True) -> float:
    """Return a limit: a number more than 0, or a share such as ``"12.5%"`` of the whole.

    Less than one byte is refused: who gives 0.15 means ``"15%"``.

    Args:
        value: the user's value.
        name: name of the argument, for the error.
        expected: description of the argument, for the error.
        whole: the number that 100% stands for.
        is_bytes: whether texts such as ``"25MB"`` are numbers, too.

    Example:
        >>> amount("12.5%", "size", "a size", 400), amount("1kB", "size", "a size", 400)
        (50.0, 1000.0)
    """
    share = _SHARE.fullmatch(value) if isinstance(value, str) else None
    found = float(share[1]) / 100 * whole if share else value
    if isinstance(found, str) and is_bytes:
        found = _size(found)
    is_fraction = is_bytes and not share and arguments.is_number(found) and found < 1
    if arguments.is_number(found) and 0 < found < _MOST and not is_fraction:
        return float(found)
    raise arguments.wrong(value, name, expected)


def in_words(size: float) -> str:
    """Return a number of bytes as a short text.

    Example:
        >>> in_words(2_500_000)
        '2.5 MB'
    """
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"
