r"""Quantizers as pure functions of NumPy arrays.

A quantizer of :math:`b` bits maps a real number to an integer and back:

.. math:: q(w) = \mathrm{clip}(\mathrm{round}(w / s) + z, l, h), \quad Q(w) = s \, (q(w) - z)

with scale :math:`s > 0` and zero point :math:`z`. Symmetric quantizers have :math:`z = 0` and the
bounds :math:`\pm(2^{b-1} - 1)`; asymmetric ones have the bounds 0 and :math:`2^b - 1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

METHODS = ("minmax", "percentile", "mse")
PERCENT = 99.9  # of the values stay inside a percentile's range
_SHRUNK = np.linspace(0.2, 1.0, 41)  # shares of the largest range that "mse" tries
_AT_ONCE = 1 << 16  # numbers that a cache holds while "mse" tries all shares


class Range(NamedTuple):
    """A scale and a zero point for each row of an array; symmetric if ``zero`` is 0."""

    scale: np.ndarray
    zero: np.ndarray


def limits(bits: int, symmetric: bool = True) -> tuple[int, int]:
    """Return the smallest and the largest integer of a quantizer."""
    return (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)


def range_between(low: np.ndarray, high: np.ndarray, bits: int, symmetric: bool = True) -> Range:
    """Return the range that holds all numbers from ``low`` to ``high``, and 0.

    Zero is always a number of the grid, so padding and pruned weights stay exact.
    """
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    first, last = limits(bits, symmetric)
    span = np.maximum(-low, high) / last if symmetric else (high - low) / last
    scale = np.where(span > np.finfo(np.float32).tiny, span, 1).astype(np.float32)
    zero = np.zeros_like(scale)
    if not symmetric:
        zero = np.clip(np.rint(-low / scale), first, last).astype(np.float32)
    return Range(scale, zero)


def range_of(rows: np.ndarray, bits: int, symmetric: bool = True, method: str = "minmax") -> Range:
    """Return a range for each row of a matrix.

    Args:
        rows: a matrix; each row has a range of its own.
        bits: width of an integer, 2 or more.
        symmetric: whether the zero point is 0.
        method: ``"minmax"`` holds all numbers, ``"percentile"`` the middle 99.9%, and ``"mse"``
            is the range with the smallest squared error.
    """
    rows = np.asarray(rows)
    low, high = rows.min(1, initial=0.0), rows.max(1, initial=0.0)
    if method == "percentile":
        tail = (100 - PERCENT) / 2
        low, high = np.percentile(rows, [tail, 100 - tail], axis=1)
    if method != "mse":
        return range_between(low, high, bits, symmetric)
    each = max(1, _AT_ONCE // max(rows.shape[1], 1))
    found = [_least_squares(rows[i : i + each], bits, symmetric) for i in range(0, len(rows), each)]
    return Range(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _least_squares(rows: np.ndarray, bits: int, symmetric: bool) -> Range:
    """Return the range with the smallest squared error for each row."""
    low, high = rows.min(1, initial=0.0), rows.max(1, initial=0.0)
    best, least = None, np.full(len(rows), np.inf)
    for share in _SHRUNK:
        found = range_between(share * low, share * high, bits, symmetric)
        error = np.square(_rounded(rows, found, bits, symmetric) - rows).sum(1)
        better = error <= least
        best = found if best is None else Range(*_chosen(better, found, best))
        least = np.where(better, error, least)
    assert best is not None
    return best


def _chosen(better: np.ndarray, found: Range, best: Range) -> list[np.ndarray]:
    return [np.where(better, new, old) for new, old in zip(found, best, strict=True)]


def integers(rows: np.ndarray, given: Range, bits: int, symmetric: bool = True) -> np.ndarray:
    """Return the integers of a matrix whose rows have ranges."""
    scale, zero = (np.asarray(each)[:, None] for each in given)
    return np.asarray(np.clip(np.rint(np.asarray(rows) / scale) + zero, *limits(bits, symmetric)))


def _rounded(rows: np.ndarray, given: Range, bits: int, symmetric: bool = True) -> np.ndarray:
    """Return the real numbers that the integers of a matrix stand for."""
    scale, zero = (np.asarray(each)[:, None] for each in given)
    return np.asarray((integers(rows, given, bits, symmetric) - zero) * scale, rows.dtype)


def as_rows(
    weights: np.ndarray, axes: int | Sequence[int] | None = None, group: int | None = None
) -> np.ndarray:
    """Return an array as a matrix whose rows have a scale each.

    Args:
        weights: an array.
        axes: axes of the channels; without them, all numbers share one scale.
        group: number of consecutive channels that share a scale, 1 by default. The last group of a
            number of channels that it does not divide is filled with zeros.
    """
    weights = np.asarray(weights)
    if axes is None:
        return weights.reshape(1, -1)
    axes = [axes] if isinstance(axes, int) else list(axes)
    front = np.moveaxis(weights, axes, range(len(axes)))
    channels = int(np.prod(front.shape[: len(axes)]))
    each = max(1, min(group or 1, channels))
    rows = front.reshape(channels, -1)
    missing = -channels % each
    rows = np.concatenate([rows, np.zeros_like(rows[:1]).repeat(missing, 0)])
    return np.asarray(rows.reshape(-1, each * rows.shape[1]))


def quantized(
    weights: np.ndarray,
    bits: int,
    *,
    axis: int | Sequence[int] | None = None,
    group: int | None = None,
    symmetric: bool = True,
    method: str = "minmax",
) -> np.ndarray:
    r"""Return weights rounded to a grid of few values.

    The default is the symmetric grid of ``2 ** bits - 1`` values that holds the largest weight:

    .. math:: Q(w) = s \cdot \mathrm{round}(w / s), \quad s = \max|w| / (2^{b-1} - 1)

    Args:
        weights: an array of real numbers.
        bits: width of a number, 2 or more.
        axis: axis of the channels, or axes, each of which has a scale; without it, all share one.
        group: number of consecutive channels that share a scale, 1 by default.
        symmetric: whether the grid is symmetric about 0.
        method: how the range is chosen: ``"minmax"``, ``"percentile"`` or ``"mse"``.
    """
    weights = np.asarray(weights)
    rows = as_rows(weights, axis, group)
    found = _rounded(rows, range_of(rows, bits, symmetric, method), bits, symmetric)
    if axis is None:
        return found.reshape(weights.shape)
    axes = [axis] if isinstance(axis, int) else list(axis)
    front = np.moveaxis(weights, axes, range(len(axes))).shape
    found = found.reshape(-1)[: weights.size].reshape(front)
    return np.moveaxis(found, range(len(axes)), axes)
