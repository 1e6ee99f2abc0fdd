"""The largest numbers of a vector, and sums of numbers at places; both on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.ops import library


def largest(x: Any, sizes: Sequence[int], counts: Sequence[int]) -> tf.Tensor:
    """The places of the largest magnitudes of each part of a vector, ascending in each part.

    Of equal magnitudes the first count. NaN is larger than infinity.

    Args:
        x: a float32 vector.
        sizes: of its parts, which follow each other.
        counts: how many places of each part.

    Example:
        >>> largest([1.0, -3.0, 2.0, 9.0], sizes=[3, 1], counts=[2, 1]).numpy()
        array([1, 2, 3], dtype=int32)
    """
    return library.load().tfscale_largest(x=x, sizes=list(sizes), counts=list(counts))


def sum_at(values: Any, places: Any, size: int) -> tf.Tensor:
    """A vector of zeros to which values are added at places, in their order.

    Args:
        values: float32.
        places: int32, each at least 0 and less than ``size``; others are an error.
        size: of the vector.
    """
    return library.load().tfscale_sum_at(values=values, places=places, size=size)
