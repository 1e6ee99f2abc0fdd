"""Lanczos's method: a basis in which a large symmetric matrix becomes small."""

from __future__ import annotations

import numpy as np

from tfscale.analysis.curvature.matrix import SymmetricMatrix

_COLUMNS = 1 << 16  # columns of the basis that are in float64 at a time
_NOTHING = 1e-6  # share of the matrix's size that float32 rounding leaves
_NOTHING_IN_DOUBLE = 1e-13


class Basis:
    """An orthonormal basis, and the matrix expressed in that basis.

    Each new vector is orthogonalized twice against all others. Without that, rounding makes the
    method find the same eigenvalues again.

    Attributes:
        vectors: rows; the first ``count`` are the basis, the next row is the candidate.
        projected: the matrix in the basis.
        rest: length of the candidate before it was normalized; 0 if there is no candidate.
    """

    def __init__(self, operator: SymmetricMatrix, width: int, start: np.ndarray, seed: int) -> None:
        self._operator = operator
        self._random = np.random.default_rng([seed, 1])
        self.vectors = np.zeros((width + 1, operator.size), operator.dtype)
        self.vectors[0] = start / np.linalg.norm(start)
        self.projected = np.zeros((width, width))
        self.count = 0
        self.rest = 1.0

    def grow(self) -> None:
        """Make one more product, and a vector that is orthogonal to all others."""
        j = self.count
        w = self._operator.products(self.vectors[j : j + 1])[0]
        self.count = j + 1
        w, parts = self._orthogonal(w)
        self.projected[j, : j + 1] = self.projected[: j + 1, j] = parts
        self.rest = float(np.linalg.norm(w))
        if self.rest <= self._nothing():
            self.rest = 0.0
            w = self._orthogonal(self._random.standard_normal(len(w)))[0]
        norm = np.linalg.norm(w)
        if self.count < len(w) and norm:
            self.vectors[self.count] = w / norm

    def shrink(self, rotation: np.ndarray, values: np.ndarray) -> None:
        """Keep some combinations of the vectors, in which the matrix is diagonal, and the
        candidate.
        """
        kept, last = len(values), self.vectors[self.count].copy()
        for columns in self._columns():
            self.vectors[:kept, columns] = rotation.T @ self.vectors[: self.count, columns]
        self.vectors[kept] = last
        self.projected[:] = 0
        np.fill_diagonal(self.projected[:kept, :kept], values)
        self.count = kept

    def combined(self, rotation: np.ndarray) -> np.ndarray:
        """Return combinations of the vectors."""
        found = np.empty((rotation.shape[1], self.vectors.shape[1]), self.vectors.dtype)
        for columns in self._columns():
            found[:, columns] = rotation.T @ self.vectors[: self.count, columns]
        return found

    def _orthogonal(self, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a vector without its components in the basis, and these components."""
        parts = np.zeros(self.count)
        for _ in range(2):
            found = np.zeros(self.count)
            for columns in self._columns():
                found += self.vectors[: self.count, columns].astype(np.float64) @ w[columns]
            for columns in self._columns():
                w[columns] -= found @ self.vectors[: self.count, columns].astype(np.float64)
            parts += found
        return w, parts

    def _columns(self) -> list[slice]:
        size = self.vectors.shape[1]
        return [slice(first, first + _COLUMNS) for first in range(0, size, _COLUMNS)]

    def _nothing(self) -> float:
        double = self.vectors.dtype == np.float64
        share = _NOTHING_IN_DOUBLE if double else _NOTHING
        return share * float(np.abs(self.projected[: self.count, : self.count]).max())
