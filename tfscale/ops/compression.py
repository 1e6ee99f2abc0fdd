"""Passes of compression methods over a gradient and what was not sent of it yet; on CPUs.

The sum of the two is never stored, and the residual changes in place.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfscale.ops import library


def largest(x: Any, count: int, residual: tf.Variable | None = None) -> tuple[Any, Any]:
    """The places of the largest magnitudes of ``x + residual``, ascending, and the numbers there.

    Of equal magnitudes the first count. NaN is larger than infinity.

    Args:
        x: float32; places are those in it as a vector.
        count: how many.
        residual: of as many numbers.

    Example:
        >>> places, numbers = largest([1.0, -3.0, 2.0, 9.0], 2)
        >>> places.numpy(), numbers.numpy()
        (array([1, 3], dtype=int32), array([-3.,  9.], dtype=float32))
    """
    given = [] if residual is None else [residual.handle]
    found = library.load().tfscale_largest(residual=given, x=x, count=count)
    return found.places, found.numbers


def sum_at(
    x: Any,
    places: Any,
    kept: Any,
    every_place: Any,
    every_number: Any,
    finite: Any,
    residual: tf.Variable,
) -> tf.Tensor:
    """Zeros of x's shape, to which numbers are added at places, in their order.

    If ``finite``, the residual becomes ``x + residual``, but for its own places.

    Args:
        x: this replica's gradient, float32.
        places, kept: what this replica has sent, and what it keeps there.
        every_place, every_number: of all replicas. A place that is not in x is an error.
        finite: whether what was sent is finite.
        residual: of x's size.
    """
    return library.load().tfscale_sum_at(
        residual=residual.handle,
        x=x,
        places=places,
        kept=kept,
        every_place=every_place,
        every_number=every_number,
        finite=finite,
    )


def low_rank_rows(x: Any, factor: Any, residual: tf.Variable) -> tf.Tensor:
    """``(x + residual) factor^T`` of a matrix."""
    return library.load().tfscale_low_rank_rows(residual=residual.handle, x=x, factor=factor)


def low_rank_columns(x: Any, basis: Any, residual: tf.Variable) -> tf.Tensor:
    """``basis^T (x + residual)``"""
    return library.load().tfscale_low_rank_columns(residual=residual.handle, x=x, basis=basis)


def low_rank_sum(
    x: Any, basis: Any, own: Any, total: Any, finite: Any, residual: tf.Variable
) -> tf.Tensor:
    """``basis total``; if ``finite``, the residual becomes ``x + residual - basis own``."""
    return library.load().tfscale_low_rank_sum(
        residual=residual.handle, x=x, basis=basis, own=own, total=total, finite=finite
    )
