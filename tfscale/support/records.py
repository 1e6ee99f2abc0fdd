"""JSON files that people may edit: errors name the wrong line or key."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfscale.support.files import replacing

LARGEST = 1 << 20  # bytes; files of tfscale have a few thousand


class RecordError(ValueError):
    """Raised if a file cannot be used; the message says where and what was expected."""


class Record:
    """An object of a JSON file; ``where`` is its place in the file, for messages."""

    def __init__(self, value: Any, path: Path, where: str = "") -> None:
        if not isinstance(value, dict):
            place = where.rstrip(".") or "the whole"
            raise RecordError(f"{path}: {place}: expected an object {{...}}, got {value!r:.60}")
        self._fields: dict[str, Any] = value
        self.path = path
        self._where = where

    @classmethod
    def read(cls, path: Path, content: bytes | None = None) -> Record:
        """Parse a file, or the content of an open file; raises ``OSError`` or ``RecordError``."""
        text = read_text(path) if content is None else decode_text(path, content)
        try:
            return cls(json.loads(text), path)
        except json.JSONDecodeError as error:
            raise RecordError(
                f"{path}, line {error.lineno}, column {error.colno}: this is not JSON: {error.msg}"
            ) from error
        except RecursionError as error:
            raise RecordError(f"{path}: expected JSON of a few levels, got hundreds") from error
        except RecordError:
            raise
        except ValueError as error:  # such as a number of thousands of digits
            raise RecordError(f"{path}: this JSON cannot be read: {error}") from error

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def wrong(self, key: str, expected: str) -> RecordError:
        """Return the error for a value that is not as expected."""
        value = repr(self._fields[key]) if key in self._fields else "nothing"
        return RecordError(f"{self.path}: {self._where}{key}: expected {expected}, got {value:.60}")

    def only(self, *keys: str) -> None:
        """Refuse other keys, which may be misspelt."""
        for key in self._fields:
            if key not in keys:
                raise self.wrong(key, f"no such key, only {', '.join(keys)}")

    def number(self, key: str) -> float:
        """Return a finite number, 0 or more."""
        value = self._fields.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, "a number")
        if not 0 <= value <= sys.float_info.max:  # NaN is not, either
            raise self.wrong(key, "a finite number, 0 or more")
        return float(value)

    def integer(self, key: str) -> int:
        """Return a whole number, 0 or more."""
        number = self.number(key)
        if number != int(number):
            raise self.wrong(key, "a whole number")
        return int(number)

    def text(self, key: str) -> str:
        """Return the field of that name, which must be a text."""
        value = self._fields.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def integers(self, key: str) -> list[int]:
        """Return the field of that name, which must be a list of whole numbers."""
        value = self._fields.get(key)
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise self.wrong(key, "a list of whole numbers")
        return value

    def texts(self, key: str) -> list[str]:
        """Return the field of that name, which must be a list of texts."""
        value = self._fields.get(key)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.wrong(key, "a list of texts")
        return value

    def flag(self, key: str) -> bool:
        """Return the field of that name, which must be true or false."""
        value = self._fields.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def record(self, key: str) -> Record:
        """Return the field of that name as a record."""
        if key not in self._fields:
            raise self.wrong(key, "an object {...}")
        return Record(self._fields[key], self.path, f"{self._where}{key}.")

    def records(self, key: str) -> list[Record]:
        """Return the field of that name as a list of records."""
        value = self._fields.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "a list [...]")
        return [
            Record(each, self.path, f"{self._where}{key}[{index}].")
            for index, each in enumerate(value)
        ]


def read_text(path: Path) -> str:
    """Return the text of a small file in UTF-8; raises ``OSError`` or ``RecordError``."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise RecordError(f"{path}: expected a file, and this is something else")
    if status.st_size > LARGEST:
        raise RecordError(
            f"{path}: expected a text of at most {LARGEST:,} bytes, got {status.st_size:,}"
        )
    return decode_text(path, path.read_bytes())


def decode_text(path: Path, content: bytes) -> str:
    """Return the content of a file in UTF-8 as text; raises ``RecordError``."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecordError(
            f"{path}: expected a text in UTF-8, and this is binary or in another encoding: {error}"
        ) from error
    if "\0" in text:
        raise RecordError(
            f"{path}: expected a text in UTF-8, and this has zero bytes: it is binary or in UTF-16"
        )
    return text


def write(path: Path, fields: Mapping[str, Any], private: bool = False) -> None:
    """Write a file for ``Record.read``: whole or not at all, even if others write it, too.

    Args:
        path: the path of the file.
        fields: the fields of the record.
        private: whether nobody else may read the file, whatever the umask.
    """
    text = json.dumps(fields, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, private) as fresh:
        fresh.write_text(text)
