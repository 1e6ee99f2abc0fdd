"""Where numbers go: a file of JSON lines, and TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf


class JsonLines:
    """One object in each line.

    Args:
        path: of the file.
        more: keep what it holds.
    """

    def __init__(self, path: Path, more: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a" if more else "w")

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """A line; a number that is not finite is written as null."""
        line = {"kind": kind, **fields}
        try:
            text = json.dumps(line, allow_nan=False)
        except ValueError:
            text = json.dumps({key: _finite(value) for key, value in line.items()})
        self._file.write(text + "\n")

    def flush(self) -> None:
        """Writes what has been held back."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Scalars, by step.

    Args:
        folder: of the files.
        group: under which TensorBoard shows them.
    """

    def __init__(self, folder: Path, group: str) -> None:
        self._group = group
        with tf.init_scope():
            self._writer = tf.summary.create_file_writer(str(folder))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes the numbers of a step."""
        with tf.init_scope(), tf.device("CPU:0"), self._writer.as_default(step=step):
            tf.summary.experimental.write_raw_pb(_scalars(self._group, numbers).SerializeToString())

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def _scalars(group: str, numbers: Mapping[str, float]) -> Any:
    """All in one operation, and without the package tensorboard, which tf.summary.scalar needs."""
    values = tf.compat.v1.Summary.Value
    return tf.compat.v1.Summary(
        value=[values(tag=f"{group}/{name}", simple_value=x) for name, x in numbers.items()]
    )
