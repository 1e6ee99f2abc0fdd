"""The search for the best of very many classes, in C++, on CPUs.

``custom_ops/search/scan.h`` says how it works.
"""

from __future__ import annotations

from typing import Any

from tfscale.native import library

MOST_REPETITIONS = 256


def best_classes(values: Any, places: Any, k: int) -> tuple[Any, Any]:
    """Return the largest sums of values, and their classes [samples, k], best first.

    A sum is that of float32 numbers in the order of repetitions. Of equal sums, the class with the
    smaller number comes first.

    Args:
        values: values of buckets [repetitions, samples, buckets], float32.
        places: ``repetition * buckets + bucket`` of each class, int32 [classes, repetitions].
        k: number of classes for each sample.

    Example:
        >>> values = [[[0.1, 0.9]], [[0.2, 0.8]]]  # of two repetitions and one sample
        >>> sums, classes = best_classes(values, [[0, 2], [1, 2], [1, 3]], 2)
        >>> sums.numpy().round(1), classes.numpy()
        (array([[1.7, 1.1]], dtype=float32), array([[2, 1]], dtype=int32))
    """
    found = library.load().tfscale_best_classes(values=values, places=places, k=k)
    return found.sums, found.classes
