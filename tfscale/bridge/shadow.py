"""Attributes of one object that hide those of its class for a while."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def shadowed(thing: Any, name: str, value: Any) -> Iterator[None]:
    """While it lasts, an attribute of this one object is another; then all is as before."""
    attributes = vars(thing)
    had, before = name in attributes, attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if had:
            attributes[name] = before
        else:
            del attributes[name]


def around(
    thing: Any, name: str, call: Callable[..., Any]
) -> contextlib.AbstractContextManager[None]:
    """While it lasts, ``thing.name(...)`` is ``call(thing.name, ...)``."""
    method = getattr(thing, name)
    return shadowed(thing, name, functools.wraps(method)(functools.partial(call, method)))
