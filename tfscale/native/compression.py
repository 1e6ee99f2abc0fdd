"""Ops of compression methods over a gradient and its residual, on CPUs.

The ops never store the sum of gradient and residual, and they change the residual in place.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfscale.native import library


def largest(x: Any, count: int, residual: tf.Variable | None = None) -> tuple[Any, Any]:
    """Return the places of the largest magnitudes of ``x + residual``, ascending, and the numbers.

    Of equal magnitudes, those at lower places come first. NaN is larger than infinity.

    Args:
        x: float32 tensor; places are indices into the flat tensor.
        count: number of places.
        residual: variable of the size of ``x``.

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
    """Return a tensor of the shape of ``x``: zeros, to which numbers are added in their order.

    If ``finite``, the residual becomes ``kept`` at ``places`` and ``x + residual`` elsewhere.

    Args:
        x: this replica's gradient, float32.
        places: places of the numbers that this replica has sent.
        kept: new residual at these places.
        every_place: places of all replicas; a place outside of ``x`` is an error.
        every_number: numbers of all replicas, to be added at ``every_place``.
        finite: whether all sent numbers are finite.
        residual: variable of the size of ``x``.
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
    """Return ``(x + residual) factor^T`` for a matrix ``x``."""
    return library.load().tfscale_low_rank_rows(residual=residual.handle, x=x, factor=factor)


def low_rank_columns(x: Any, basis: Any, residual: tf.Variable) -> tf.Tensor:
    """Return ``basis^T (x + residual)``."""
    return library.load().tfscale_low_rank_columns(residual=residual.handle, x=x, basis=basis)


def low_rank_sum(
    x: Any, basis: Any, own: Any, total: Any, finite: Any, residual: tf.Variable
) -> tf.Tensor:
    """Return ``basis total``; if ``finite``, the residual becomes ``x + residual - basis own``."""
    return library.load().tfscale_low_rank_sum(
        residual=residual.handle, x=x, basis=basis, own=own, total=total, finite=finite
    )
