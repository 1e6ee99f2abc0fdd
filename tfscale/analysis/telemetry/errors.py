"""Measurement of the errors of lossy methods, bucket by bucket.

While a step is traced, each bucket that is not summed exactly gets a few more operations, which
copy a sample of it. The errors are computed from the copies, between steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.collectives.wires import BLOCK, FORMATS
from tfscale.compression.method import Method, Wire
from tfscale.native.bucket import BucketId
from tfscale.native.cell import Cell
from tfscale.native.group import host_of

_BLOCKS = 64  # blocks of a sample


@dataclasses.dataclass(frozen=True)
class Distortion:
    """The error of one bucket's method in the last step, on this process's first rank.

    Attributes:
        bucket: the bucket.
        wire: the format that the bucket's method sends.
        method: the method's name.
        error: norm of the error / norm of the gradients.
        measured: whether the error was measured; if not, it is a bound for one rounding.
    """

    bucket: BucketId
    wire: str
    method: str
    error: float
    measured: bool


class Samples:
    """Samples of all buckets that are not summed exactly.

    Args:
        device: device of this process's first rank.
    """

    def __init__(self, device: str) -> None:
        self._host = host_of(device)
        self._cells: dict[BucketId, tuple[Method, list[Cell]]] = {}

    def watch(
        self, bucket: BucketId, method: Method, gradients: tf.Tensor, lost: tf.Tensor | None
    ) -> None:
        """Add operations that copy a sample, while a step is traced: see ``Reducer.watch``."""
        if lost is None and not isinstance(method, Wire):
            return  # the method's error is unknown
        parts = [_sample(x) for x in (gradients, lost) if x is not None]
        with tf.device(self._host):
            if bucket not in self._cells:
                with tf.init_scope():
                    cells = [Cell(tf.float32) for _ in parts]
                    for cell in cells:
                        cell.assign(tf.zeros([0, BLOCK]))
                self._cells[bucket] = (method, cells)
            for cell, part in zip(self._cells[bucket][1], parts, strict=True):
                cell.assign(part)

    def distortions(self) -> list[Distortion]:
        """Return the errors of the last step, for buckets that have gradients."""
        found = []
        for bucket, (method, cells) in self._cells.items():
            x, *lost = [cell.numpy().astype(np.float64) for cell in cells]
            gone = lost[0] if lost else _bound(method.wires[0], x)
            size, missing = _norm(x), _norm(gone)
            if size > 0 and np.isfinite(size) and np.isfinite(missing):
                found.append(
                    Distortion(bucket, method.wires[0], str(method), missing / size, bool(lost))
                )
        return found


def _norm(x: Any) -> float:
    with np.errstate(all="ignore"):
        return float(np.sqrt(np.square(x).sum()))  # unlike numpy's own norm, in this thread alone


def _sample(x: tf.Tensor) -> tf.Tensor:
    """Return whole blocks from all over a vector; a short last block counts only if alone."""
    flat = tf.cast(tf.reshape(x, [-1]), tf.float32)
    size = flat.shape.num_elements()
    blocks = size // BLOCK
    if blocks == 0:
        return tf.pad(flat, [[0, BLOCK - size]])[tf.newaxis]
    stride = max(1, blocks // _BLOCKS)
    rows = tf.reshape(flat[: blocks * BLOCK], [blocks, BLOCK])
    return tf.gather(rows, range(0, blocks, stride))  # rows[::stride] takes ten times as long


def _bound(wire: str, x: Any) -> Any:
    """Return the largest error of one rounding by docs/wires.md, without float rounding."""
    size = np.abs(x)
    largest = np.max(size, axis=-1, keepdims=True, initial=0) + np.zeros_like(size)
    error = FORMATS[wire].unaided
    with np.errstate(invalid="ignore"):  # raised by infinite numbers
        return np.maximum(size / error.of_number, largest / error.of_block)
