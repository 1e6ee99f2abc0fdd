"""Checks of users' arguments, with one form of error: what is expected, and what was received.

Each check returns the argument, with numbers as Python's own types. A ``bool`` is not a number;
numpy's numbers are. NaN, infinities and numbers that would overflow later are refused. ``what``
describes the argument in words, ``example`` is a correct value.
"""

from __future__ import annotations

import numbers
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tfscale.support.names import guess

LARGEST = (1 << 63) - 1  # int64
LARGEST_REAL = 3.4e38  # float32
LONGEST = 2_000_000  # seconds: as milliseconds they fit into C++'s int
_TOLD = 10_000  # larger bounds belong to the machine: only errors about exceeding them show them
_SHOWN = 160  # largest number of shown characters of a value

_NUMPYS_BOOL = ("<class 'numpy.bool'>", "<class 'numpy.bool_'>")  # NumPy 2 and 1

Kind = TypeVar("Kind")


def wrong(value: object, name: str, expected: str, advice: str = "") -> ValueError:
    """Return the error for an argument that is not as expected."""
    if isinstance(value, type) and not advice:
        advice = f"This is the class: pass an instance, such as {value.__name__}(...)"
    return ValueError(f"{name} is {expected}; got {shown(value)}{advice and '. '}{advice}")


def shown(value: object) -> str:
    """Return a value as an error shows it, on one line."""
    try:
        words = " ".join(repr(value).split())
    except Exception:  # Python refuses to write integers of thousands of digits
        words = f"<{type(value).__name__} that cannot be shown>"
    return words if len(words) <= _SHOWN else f"{words[: _SHOWN - 3]}..."


def optional(check: Callable[..., Kind], value: Any, *rest: Any, **words: Any) -> Kind | None:
    """Return None for None, or the result of a check."""
    return None if value is None else check(value, *rest, **words)


def whole(
    value: Any,
    name: str,
    least: int = -LARGEST,
    most: int = LARGEST,
    *,
    what: str = "a whole number",
    example: str = "",
) -> int:
    """Return a whole number between two bounds, both included."""
    if type(value) is int and least <= value <= most:  # the usual case, and the fastest
        return value
    if is_number(value, numbers.Integral) and least <= value <= most:
        return int(value)
    raise wrong(value, name, what + _bounds(value, least, None, most, None) + _such_as(example))


def real(
    value: Any,
    name: str,
    least: float = -LARGEST_REAL,
    most: float = LARGEST_REAL,
    *,
    above: float | None = None,
    below: float | None = None,
    what: str = "a number",
    example: str = "",
) -> float:
    """Return a number within bounds, of which only ``least`` and ``most`` are allowed values.

    An int stays an int.
    """
    if (
        is_number(value)
        and least <= value <= most  # NaN is not
        and (above is None or value > above)
        and (below is None or value < below)
        and not _is_huge(value)
    ):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise wrong(value, name, what + _bounds(value, least, above, most, below) + _such_as(example))


def seconds(value: Any, name: str, **bounds: Any) -> float:
    """Return a number of seconds, by default more than 0."""
    bounds = bounds or {"above": 0}
    return real(value, name, most=LONGEST, what="a number of seconds", **bounds)


def flag(value: Any, name: str) -> bool:
    """Return True or False."""
    if isinstance(value, bool) or str(type(value)) in _NUMPYS_BOOL:
        return bool(value)
    raise wrong(value, name, "True or False")


def choice(value: Any, name: str, known: Collection[str], other: str = "") -> str:
    """Return one of the known texts; ``other`` describes further choices in the error."""
    if isinstance(value, str) and value in known:
        return value
    hint = guess(value, known) if isinstance(value, str) else ""
    raise wrong(value, name, _either([*map(repr, known), *([other] if other else [])]), hint)


def instance(
    value: Any, name: str, kind: type[Kind] | tuple[type[Kind], ...], expected: str
) -> Kind:
    """Return an instance of a class, or of one of several."""
    if isinstance(value, kind):
        return value
    raise wrong(value, name, expected)


def function(value: Any, name: str, expected: str) -> Any:
    """Return a callable."""
    if callable(value):
        return value
    raise wrong(value, name, expected)


def text(value: Any, name: str, expected: str = "a text") -> str:
    """Return a text that is not empty."""
    if isinstance(value, str) and value:
        return str(value)
    raise wrong(value, name, expected)


def pattern(value: Any, name: str) -> re.Pattern[str]:
    """Return a regular expression for variables' paths, compiled."""
    expected = (
        "a regular expression that is searched in a variable's path, such as 'dense_1/kernel' "
        "(for all kernels 'kernel$', not '*kernel')"
    )
    if not isinstance(value, str):
        raise wrong(value, name, expected)
    try:
        return re.compile(value)
    except re.error as error:
        raise wrong(value, name, expected, f"Python says of it: {error}") from None


def path(value: Any, name: str) -> str | Path:
    """Return the path of a file or a folder, as it was given."""
    if isinstance(value, (str, os.PathLike)) and str(value):
        return value if isinstance(value, str) else Path(value)
    raise wrong(value, name, "a path, such as 'run.json'")


def items(
    value: Any,
    name: str,
    expected: str,
    item: Callable[[Any, str], Any] = lambda value, name: value,
    *,
    least: int = 1,
    most: int = LARGEST,
) -> tuple[Any, ...]:
    """Return a list or another collection as a tuple, whose elements ``item`` has checked.

    A text is refused, since a collection of its letters is hardly what the caller means.
    """
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise wrong(value, name, expected)
    try:
        found = tuple(value)
    except TypeError:  # an array or a tensor without dimensions
        raise wrong(value, name, expected) from None
    if not least <= len(found) <= most:
        raise wrong(value, name, expected)
    return tuple(item(each, f"{name}[{place}]") for place, each in enumerate(found))


def data(value: Any, name: str) -> Any:
    """Return data that Keras may accept: arrays, structures of arrays, a dataset.

    Keras itself checks shapes and types.
    """
    if isinstance(value, (list, tuple, Mapping)):
        parts = list(value.values()) if isinstance(value, Mapping) else list(value)
        is_data = bool(parts) and not any(part is None for part in parts)
    else:
        has_parts = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
        is_data = has_parts and not isinstance(value, str) and getattr(value, "shape", None) != ()
    if not is_data:
        raise wrong(value, name, "an array, a structure of arrays, or a dataset")
    return value


def mapping(value: Any, name: str, expected: str) -> dict[Any, Any]:
    """Return a mapping as a dict."""
    if isinstance(value, Mapping):
        return dict(value)
    raise wrong(value, name, expected)


def is_number(value: object, kind: type = numbers.Real) -> bool:
    """Return whether a value is a number of a kind."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_huge(value: object) -> bool:
    """Return whether a value is an int that is too large for a tensor."""
    return is_number(value, numbers.Integral) and abs(value) > LARGEST  # type: ignore[arg-type]


def _bounds(value: Any, least: float, above: float | None, most: float, below: float | None) -> str:
    """Describe the bounds, without those of the machine unless a value exceeds them."""
    says_least = least > -_TOLD or (is_number(value) and value < least)
    says_most = most < _TOLD or (is_number(value) and value > most)
    if says_least and says_most and above is below is None:
        return f", from {least:,} to {most:,}"
    parts = []
    if above is not None:
        parts.append(f"more than {above:,}")
    elif says_least:
        parts.append(f"{least:,} or more")
    if below is not None:
        parts.append(f"less than {below:,}")
    elif says_most:
        parts.append(f"at most {most:,}")
    elif _is_huge(value):
        parts.append("of 64 bits if it is an int")
    return f", {' and '.join(parts)}" if parts else ""


def _such_as(example: str) -> str:
    return f", such as {example}" if example else ""


def _either(ends: list[str]) -> str:
    return ends[0] if len(ends) == 1 else f"{', '.join(ends[:-1])} or {ends[-1]}"
