"""Replaces a function of Keras or TensorFlow for as long as somebody needs it, in all threads.

A replacement asks what its own thread is doing, and calls the original where that is nothing of
ours. So the threads of replicas, and trainings beside each other, can share one replacement: the
first who asks for it installs it, the last who leaves puts the original back.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

_changing = threading.Lock()
_users: dict[tuple[int, str], int] = {}


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, ``owner.name(...)`` is ``replacement(original, ...)``.

    Args:
        owner: a module or a class.
        name: of a function of it. All who replace it at the same time must do so alike.
        replacement: gets the original before all other arguments.
    """
    key = (id(owner), name)
    original = _install(key, owner, name, replacement)
    try:
        yield
    finally:
        _leave(key, owner, name, original)


def _install(
    key: tuple[int, str], owner: Any, name: str, replacement: Callable[..., Any]
) -> Callable[..., Any]:
    with _changing:
        current = vars(owner)[name]
        original: Callable[..., Any] = getattr(current, "__wrapped__", current)
        if not _users.get(key):
            original = current

            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                return replacement(original, *args, **kwargs)

            setattr(owner, name, call)
        _users[key] = _users.get(key, 0) + 1
        return original


def _leave(key: tuple[int, str], owner: Any, name: str, original: Callable[..., Any]) -> None:
    with _changing:
        _users[key] -= 1
        if not _users[key]:
            del _users[key]
            setattr(owner, name, original)
