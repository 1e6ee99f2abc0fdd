"""Rules that say what is cut into slices: patterns of weights' paths, and ways to cut a layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tfscale.support import arguments

# Ways to cut weights.
COLUMNS, ROWS, HEADS, VOCABULARY = "columns", "rows", "heads", "vocabulary"

WEIGHTS = (COLUMNS, ROWS, HEADS, VOCABULARY)

# Axes of images, sequences and volumes along which activations are cut, while weights stay copies.
LENGTH, DEPTH, HEIGHT, WIDTH = "length", "depth", "height", "width"

AXES = (LENGTH, DEPTH, HEIGHT, WIDTH)
KINDS = (*WEIGHTS, *AXES)


class Rules:
    """Rules of tensor parallelism, such as ``{"ffn/up": "columns", "ffn/down": "rows"}``.

    Args:
        rules: for each pattern, how layers are cut whose weights' paths it matches. A pattern is a
            regular expression that is searched in a path; the first rule that matches counts.
    """

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules = [
            (pattern, re.compile(pattern), arguments.choice(kind, f"tensor[{pattern!r}]", KINDS))
            for pattern, kind in rules.items()
        ]

    def find(self, path: str) -> tuple[str, str] | None:
        """Return the pattern that matches a weight's path, and the rule's kind; else None."""
        found = ((text, kind) for text, regex, kind in self._rules if regex.search(path))
        return next(found, None)

    def idle(self, paths: Iterable[str]) -> list[str]:
        """Return the patterns that match none of these paths."""
        every = list(paths)
        return [text for text, regex, _ in self._rules if not any(map(regex.search, every))]


def cuts_activations(rules: Mapping[str, str]) -> bool:
    """Return whether a rule cuts activations along an axis, and not weights."""
    return any(kind in AXES for kind in rules.values())


def checked(rules: object, name: str = "tensor") -> dict[str, str]:
    """Return rules that a user has given, or raise."""
    expected = 'a mapping from patterns of paths to ways to cut, such as {"ffn/up": "columns"}'
    found = arguments.mapping(rules, name, expected)
    if not found:
        raise arguments.wrong(rules, name, expected, "Leave it out to cut nothing")
    for pattern in found:
        arguments.pattern(pattern, f"a key of {name}")
    Rules(found)
    return found
