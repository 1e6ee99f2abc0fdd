"""Selection of the variables that a matrix is over, and their places in a vector."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tfscale.bridge.objects import path_of
from tfscale.support import arguments


def chosen(model: Any, rules: str | Iterable[Any] | None, who: str) -> list[Any]:
    """Return the trainable variables of a model that match any of the rules, in the model's order.

    Args:
        model: a built model.
        rules: regular expressions, searched in paths, or variables; None for all.
        who: name of the caller, for messages.
    """
    every = list(model.trainable_variables)
    listed = [""] if rules is None else checked_variables(rules) or ()
    matched = [{id(v) for v in every if _matches(rule, v)} for rule in listed]
    idle = [rule for rule, found in zip(listed, matched, strict=True) if not found]
    if idle or not matched:
        paths = ", ".join(path_of(v) for v in every[:5])
        what = [rule if isinstance(rule, str) else path_of(rule) for rule in idle if rule != ""]
        which = f"{', '.join(what)!r} in " if what else ""
        raise ValueError(
            f"{who}: {which}variables={rules!r} matches no trainable variable of "
            f"{model.name!r}; their paths are {paths or 'none'}{', ...' if len(every) > 5 else ''}"
        )
    return [v for v in every if any(id(v) in found for found in matched)]


def _matches(rule: Any, variable: Any) -> bool:
    if not isinstance(rule, str):
        return rule is variable
    return arguments.pattern(rule, "variables").search(path_of(variable)) is not None


def checked_variables(variables: str | Iterable[Any] | None) -> tuple[Any, ...] | None:
    """Return the user's choice of variables as a tuple; None stands for all."""
    expected = "a list of regular expressions, searched in variables' paths, or of variables"
    given = (variables,) if isinstance(variables, str) else variables
    return arguments.optional(arguments.items, given, "variables", expected, _checked_rule)


def _checked_rule(value: Any, name: str) -> Any:
    if isinstance(value, str):
        arguments.pattern(value, name)
    elif not hasattr(value, "assign"):
        raise arguments.wrong(value, name, "a regular expression or a variable")
    return value


def places(variables: Sequence[Any]) -> dict[str, slice]:
    """Return each variable's place in a vector, by its path; repeated paths get a number."""
    ends = itertools.accumulate((int(np.prod(v.shape)) for v in variables), initial=0)
    found: dict[str, slice] = {}
    for v, (begin, end) in zip(variables, itertools.pairwise(ends), strict=True):
        path, count = path_of(v), 2
        while path in found:
            path, count = f"{path_of(v)} ({count})", count + 1
        found[path] = slice(begin, end)
    return found
