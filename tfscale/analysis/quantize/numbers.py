"""Quantizers as pure functions of NumPy arrays."""

from __future__ import annotations

import numpy as np


def quantized(
    weights: np.ndarray, bits: int, *, axis: int | None = None, group: int | None = None
) -> np.ndarray:
    r"""Return weights rounded to a symmetric grid of ``2 ** bits - 1`` values.

    .. math:: Q(w) = s \cdot \mathrm{round}(w / s), \quad s = \max|w| / (2^{b-1} - 1)

    Args:
        weights: an array of real numbers.
        bits: width of a number, 2 or more.
        axis: axis of the channels, each of which has a scale; without it, all share one.
        group: number of consecutive channels that share a scale, 1 by default.
    """
    weights = np.asarray(weights)
    if axis is None:
        return _rounded(weights.reshape(1, -1), bits).reshape(weights.shape)
    rows = np.moveaxis(weights, axis, 0)
    flat = rows.reshape(len(rows), -1)
    each = 1 if group is None else group
    parts = [_rounded(flat[i : i + each].reshape(1, -1), bits) for i in range(0, len(flat), each)]
    found = np.concatenate(parts, axis=1) if each > 1 else _rounded(flat, bits)
    return np.moveaxis(found.reshape(rows.shape), 0, axis)


def _rounded(rows: np.ndarray, bits: int) -> np.ndarray:
    """Round each row by its own scale."""
    largest = np.abs(rows).max(1, keepdims=True, initial=0.0)
    scales = largest / (2 ** (bits - 1) - 1)
    scales = np.where(scales > 0, scales, 1).astype(rows.dtype)  # a row of zeros stays zero
    return np.asarray(np.rint(rows / scales) * scales, rows.dtype)
