"""Matrices that are known, as operators."""

from __future__ import annotations

import numpy as np

from tfscale.analysis.curvature.operator import Operator


class Known(Operator):
    """A symmetric matrix of numpy, whose first half of variables is one layer, the rest another."""

    def __init__(self, matrix, **settings):
        half = len(matrix) // 2
        parts = {"first/kernel": slice(0, half), "second/kernel": slice(half, len(matrix))}
        super().__init__(parts, **settings)
        self.matrix = matrix

    def products(self, vectors):
        return np.asarray(vectors, np.float64) @ self.matrix


def spread(size=60, seed=0):
    """A matrix like that of a net: a few large eigenvalues, many small ones, some negative."""
    rng = np.random.default_rng(seed)
    values = np.concatenate([[10.0, 7.0, 4.0], rng.normal(0, 0.3, size - 3)])
    basis = np.linalg.qr(rng.standard_normal((size, size)))[0]
    return (basis * values) @ basis.T


def covered(estimates, truth, rounding=1e-12):
    """Count the estimates whose true number is within their 95% error bars."""
    bars = (each.interval(0.95) for each in estimates)
    return sum(low - rounding <= truth <= high + rounding for low, high in bars)
