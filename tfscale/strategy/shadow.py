"""Attributes of one object that hide those of its class for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
