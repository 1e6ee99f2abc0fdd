"""Which variables of a model a matrix is over, and where they are in a vector."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tfscale.bridge.objects import path_of


def chosen(model: Any, rules: str | Iterable[Any] | None, who: str) -> list[Any]:
    """The trainable variables of a model to which any of the rules applies, in its order.

    Args:
        model: built.
        rules: regular expressions, searched in paths, or variables; None for all.
        who: asks, for messages.
    """
    every = list(model.trainable_variables)
    if rules is None:
        found = every
    else:
        listed = [rules] if isinstance(rules, str) else list(rules)
        patterns = [_pattern(who, rule) for rule in listed if isinstance(rule, str)]
        given = {id(rule) for rule in listed if not isinstance(rule, str)}
        found = [
            v
            for v in every
            if id(v) in given or any(pattern.search(path_of(v)) for pattern in patterns)
        ]
    if not found:
        paths = ", ".join(path_of(v) for v in every[:5])
        raise ValueError(
            f"{who}: no trainable variable of {model.name!r} is meant by variables={rules!r}; "
            f"their paths are {paths or 'none'}{', ...' if len(every) > 5 else ''}"
        )
    return found


def _pattern(who: str, rule: str) -> re.Pattern[str]:
    try:
        return re.compile(rule)
    except re.error as error:
        raise ValueError(
            f"{who}: variables are regular expressions, searched in paths (such as "
            f'"dense/kernel"), or variables; got {rule!r}: {error}'
        ) from error


def places(variables: Sequence[Any]) -> dict[str, slice]:
    """Where each variable is in a vector, by its path; paths that come twice get a number."""
    ends = itertools.accumulate((int(np.prod(v.shape)) for v in variables), initial=0)
    found: dict[str, slice] = {}
    for v, (begin, end) in zip(variables, itertools.pairwise(ends), strict=True):
        path, count = path_of(v), 2
        while path in found:
            path, count = f"{path_of(v)} ({count})", count + 1
        found[path] = slice(begin, end)
    return found
