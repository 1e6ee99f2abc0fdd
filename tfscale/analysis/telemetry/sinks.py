"""Writers of numbers: a file of JSON lines, and TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf


class JsonLines:
    """Writer of JSON lines, one object in each line.

    Args:
        path: the path of the file.
        more: whether to append to the file.
    """

    def __init__(self, path: Path, more: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a" if more else "w")

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write a line; a number that is not finite becomes null."""
        line = {"kind": kind, **fields}
        try:
            text = json.dumps(line, allow_nan=False)
        except ValueError:
            text = json.dumps({key: _finite(value) for key, value in line.items()})
        self._file.write(text + "\n")

    def flush(self) -> None:
        """Write buffered lines to the file."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Writer of scalars for TensorBoard.

    Args:
        folder: the folder of the files.
        group: the group in which TensorBoard shows the scalars.
    """

    def __init__(self, folder: Path, group: str) -> None:
        self._group = group
        with tf.init_scope():
            self._writer = tf.summary.create_file_writer(str(folder))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        always = tf.summary.record_if(True)  # Keras's TensorBoard may record some steps only
        with tf.init_scope(), tf.device("CPU:0"), self._writer.as_default(step=step), always:
            tf.summary.experimental.write_raw_pb(_scalars(self._group, numbers).SerializeToString())

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _scalars(group: str, numbers: Mapping[str, float]) -> Any:
    """Return a summary of all numbers.

    It takes one operation, and does not need the package tensorboard as tf.summary.scalar does.
    """
    values = tf.compat.v1.Summary.Value
    return tf.compat.v1.Summary(
        value=[values(tag=f"{group}/{name}", simple_value=x) for name, x in numbers.items()]
    )
