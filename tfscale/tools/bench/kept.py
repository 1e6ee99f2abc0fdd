"""Results that a file keeps, so that a benchmark that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Kept:
    """Results by key. A file has a line for each, which is written as soon as the result is known.

    Args:
        file: path of the file; None keeps nothing.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._known: dict[str, Any] = {}
        if file is None or not file.exists():
            return
        try:
            self._known = dict(map(json.loads, file.read_text().splitlines()))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{file} has lines that are not results of this benchmark: {error}. Give --kept "
                "another name"
            ) from error

    def of(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the result of a key; make it if the file does not have it."""
        if key not in self._known:
            self._known[key] = make()
            if self._file is not None:
                with self._file.open("a") as lines:
                    lines.write(json.dumps([key, self._known[key]]) + "\n")
        return self._known[key]

    def has(self, key: str) -> bool:
        """Return whether the result of a key is known."""
        return key in self._known
