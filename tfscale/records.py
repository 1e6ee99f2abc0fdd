"""JSON that people may edit: what is wrong with it is said by line or by key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfscale.files import replacing


class RecordError(ValueError):
    """A file that cannot be used; the message says where and what was expected."""


class Record:
    """An object of a JSON file; ``where`` leads to it, for messages."""

    def __init__(self, value: Any, path: Path, where: str = "") -> None:
        if not isinstance(value, dict):
            place = where.rstrip(".") or "the whole"
            raise RecordError(f"{path}: {place}: expected an object {{...}}, got {value!r:.60}")
        self._fields: dict[str, Any] = value
        self.path = path
        self._where = where

    @classmethod
    def read(cls, path: Path) -> Record:
        """Open a file; raises ``OSError`` or ``RecordError``."""
        try:
            return cls(json.loads(path.read_text()), path)
        except json.JSONDecodeError as error:
            raise RecordError(
                f"{path}, line {error.lineno}, column {error.colno}: this is not JSON: {error.msg}"
            ) from error
        except UnicodeDecodeError as error:
            raise RecordError(f"{path}: this is not text: {error}") from error

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def wrong(self, key: str, expected: str) -> RecordError:
        """The error for a value that is not what it should be."""
        value = repr(self._fields[key]) if key in self._fields else "nothing"
        return RecordError(f"{self.path}: {self._where}{key}: expected {expected}, got {value:.60}")

    def only(self, *keys: str) -> None:
        """Refuse keys that nobody would read: they may be misspelt."""
        for key in self._fields:
            if key not in keys:
                raise self.wrong(key, f"no such key, only {', '.join(keys)}")

    def number(self, key: str) -> float:
        """A finite number, not below 0."""
        value = self._fields.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, "a number")
        if not math.isfinite(value) or value < 0:
            raise self.wrong(key, "a finite number, 0 or more")
        return float(value)

    def integer(self, key: str) -> int:
        """A whole number, not below 0."""
        number = self.number(key)
        if number != int(number):
            raise self.wrong(key, "a whole number")
        return int(number)

    def text(self, key: str) -> str:
        value = self._fields.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def integers(self, key: str) -> list[int]:
        value = self._fields.get(key)
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise self.wrong(key, "a list of whole numbers")
        return value

    def record(self, key: str) -> Record:
        if key not in self._fields:
            raise self.wrong(key, "an object {...}")
        return Record(self._fields[key], self.path, f"{self._where}{key}.")

    def records(self, key: str) -> list[Record]:
        value = self._fields.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "a list [...]")
        return [
            Record(each, self.path, f"{self._where}{key}[{index}].")
            for index, each in enumerate(value)
        ]


def write(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a file for ``Record.read``: all of it or nothing, whoever else writes it."""
    text = json.dumps(fields, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as fresh:
        fresh.write_text(text)
