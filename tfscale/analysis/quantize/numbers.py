"""Quantizers as pure functions of NumPy arrays."""

from __future__ import annotations

import numpy as np


def quantized(
    weights: np.ndarray,
    bits: int,
    *,
    axis: int | tuple[int, ...] | None = None,
    group: int | None = None,
) -> np.ndarray:
    r"""Return weights rounded to a symmetric grid of ``2 ** bits - 1`` values.

    .. math:: Q(w) = s \cdot \mathrm{round}(w / s), \quad s = \max|w| / (2^{b-1} - 1)

    Args:
        weights: an array of real numbers.
        bits: width of a number, 2 or more.
        axis: axis or axes of the channels, each of which has a scale; without it, all share one.
        group: number of consecutive channels that share a scale, 1 by default.
    """
    weights = np.asarray(weights)
    if axis is None:
        return _rounded(weights.reshape(1, -1), bits).reshape(weights.shape)
    rows = channels(weights, axis)
    each = 1 if group is None else group
    if each > 1:
        parts = [rows[i : i + each] for i in range(0, len(rows), each)]
        found = [_rounded(part.reshape(1, -1), bits).reshape(part.shape) for part in parts]
        return from_channels(np.concatenate(found), axis, weights.shape)
    return from_channels(_rounded(rows, bits), axis, weights.shape)


def channels(weights: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """Return an array as a matrix with one row for each channel."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    moved = np.moveaxis(weights, axes, range(len(axes)))
    return moved.reshape(int(np.prod(moved.shape[: len(axes)])), -1)


def from_channels(
    rows: np.ndarray, axis: int | tuple[int, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """Return the array of a shape whose channels are the rows of a matrix."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    places = [one % len(shape) for one in axes]
    rest = [one for one in range(len(shape)) if one not in places]
    moved = rows.reshape([shape[one] for one in [*places, *rest]])
    return np.moveaxis(moved, range(len(axes)), axes)


def _rounded(rows: np.ndarray, bits: int) -> np.ndarray:
    """Round each row by its own scale."""
    largest = np.abs(rows).max(1, keepdims=True, initial=0.0)
    scales = largest / (2 ** (bits - 1) - 1)
    scales = np.where(scales > 0, scales, 1).astype(rows.dtype)  # a row of zeros stays zero
    return np.asarray(np.rint(rows / scales) * scales, rows.dtype)
