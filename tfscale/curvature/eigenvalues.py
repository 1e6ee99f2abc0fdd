"""Eigenvalues at the ends of a spectrum."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from tfscale.curvature.results import Eigenvalues

if TYPE_CHECKING:
    from tfscale.curvature.operator import Operator


def lanczos(
    operator: Operator,
    top: int,
    bottom: int,
    *,
    seed: int = 0,
    tolerance: float = 1e-4,
    limit: int = 300,
    basis: int | None = None,
) -> Eigenvalues:
    """The largest and the smallest eigenvalues, by Lanczos's method, restarted with Ritz vectors.

    Each new vector is made orthogonal to all others, twice.
    """
    n, wanted = operator.size, top + bottom
    width = min(n, basis or max(2 * wanted + 18, 20))
    vectors = np.zeros((width + 1, n), operator.dtype)
    projected = np.zeros((width, width))
    start = np.random.default_rng(seed).standard_normal(n).astype(operator.dtype)
    vectors[0] = start / np.linalg.norm(start)
    kept, used = 0, 0
    while True:
        for j in range(kept, width):
            w = operator.products(vectors[j : j + 1])[0]
            used += 1
            h = np.zeros(j + 1)
            for _ in range(2):
                c = vectors[: j + 1].astype(np.float64) @ w
                w -= c @ vectors[: j + 1].astype(np.float64)
                h += c
            projected[j, : j + 1] = projected[: j + 1, j] = h
            beta = float(np.linalg.norm(w))
            if beta <= 1e-10 * max(1e-300, np.abs(projected).max()):
                w = np.random.default_rng([seed, j]).standard_normal(n)
                for _ in range(2):
                    w -= (vectors[: j + 1] @ w) @ vectors[: j + 1]
                beta, norm = 0.0, float(np.linalg.norm(w))
            else:
                norm = beta
            if j + 1 < n:
                vectors[j + 1] = w / norm
        values, rotation = np.linalg.eigh(projected)
        order = [*range(width - 1, width - 1 - top, -1), *range(bottom)]
        residuals = np.abs(beta * rotation[-1, order])
        size = np.abs(values).max()
        done = bool(np.all(residuals <= tolerance * size)) or width == n
        if done or used + 1 > limit:
            break
        kept = min(width - 2, wanted + (width - wanted) // 2)
        high = max(top, kept - bottom - (kept - wanted) // 2) if top else 0
        keep = [*range(width - high, width), *range(kept - high)]
        fresh = rotation[:, keep].T @ vectors[:width]
        vectors[kept] = vectors[width]
        vectors[:kept] = fresh
        projected[:] = 0
        projected[range(kept), range(kept)] = values[keep]
    if not done:
        logging.getLogger("tfscale").warning(
            "eigenvalues did not converge in %d products: the largest residual is %.2g, of an "
            "eigenvalue of %.6g", used, residuals.max(), values[order[int(residuals.argmax())]],
        )  # fmt: skip
    found = tuple(float(values[i]) for i in order)
    return Eigenvalues(
        found[:top], found[top:], tuple(map(float, residuals)), used, done,
        (rotation[:, order].T @ vectors[:width]).astype(operator.dtype),
    )  # fmt: skip
