"""Regular expressions, searched in variables' paths, that exclude variables from a rule."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tfscale.compression.policy import DEFAULT_SENSITIVE
from tfscale.support import arguments

# Matches biases, and the scales and offsets of normalization layers.
BIAS_AND_NORM = (DEFAULT_SENSITIVE,)


def checked(argument: str, patterns: Iterable[str] | str | None) -> tuple[str, ...]:
    """Return the patterns as a tuple, or raise if they are not regular expressions.

    Args:
        argument: the argument's name, for errors.
        patterns: several patterns, or one; None means no patterns.

    Example:
        >>> checked("exclude_from_weight_decay", ["bias$", "^head/"])
        ('bias$', '^head/')
    """
    if patterns is None:
        return ()
    given = (patterns,) if isinstance(patterns, str) else patterns
    expected = "a list of regular expressions, searched in variables' paths"
    found = arguments.items(given, argument, expected, arguments.pattern, least=0)
    return tuple(pattern.pattern for pattern in found)


def found(patterns: Iterable[str], path: str) -> bool:
    """Return whether any pattern is found in a path.

    Example:
        >>> found(BIAS_AND_NORM, "block/layer_normalization/gamma")
        True
        >>> found(BIAS_AND_NORM, "block/dense/kernel")
        False
    """
    return any(re.search(pattern, path) for pattern in patterns)


def exactly(path: str) -> str:
    """Return the pattern that matches this path alone."""
    return f"^{re.escape(path)}$"


def idle(patterns: Iterable[str], paths: Iterable[str]) -> list[str]:
    """Return the patterns, without the default ones, that match none of the paths."""
    paths = list(paths)
    own = (pattern for pattern in patterns if pattern not in BIAS_AND_NORM)
    return [pattern for pattern in own if not any(found([pattern], path) for path in paths)]
