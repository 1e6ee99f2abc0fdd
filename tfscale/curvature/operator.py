"""What estimators ask of a matrix: its products with vectors."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfscale.curvature import eigenvalues, trace
from tfscale.curvature.results import Eigenvalues, Trace


class Operator(abc.ABC):
    """A symmetric matrix that is known by its products with vectors.

    A vector is an array of ``size`` numbers: those of all variables, one behind the other.

    Args:
        parts: where in a vector each variable is, by its path.
        dtype: in which vectors are kept; products are added up in float64.
    """

    def __init__(self, parts: Mapping[str, slice], dtype: Any = np.float64) -> None:
        self.parts = dict(parts)
        self.size = max((part.stop for part in self.parts.values()), default=0)
        self.dtype = np.dtype(dtype)

    @abc.abstractmethod
    def products(self, vectors: np.ndarray) -> np.ndarray:
        """The products with vectors, each of which is a row: rows in float64."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.size

    def __matmul__(self, v: Any) -> np.ndarray:
        """The product with a vector, or with the columns of a matrix."""
        v = np.asarray(v)
        if v.ndim not in (1, 2) or v.shape[0] != self.size:
            raise ValueError(
                f"a vector for this operator has {self.size} numbers, got an array of shape "
                f"{v.shape}"
            )
        rows: np.ndarray = self.products(np.atleast_2d(v.T))
        return rows.reshape(-1) if v.ndim == 1 else rows.T

    def trace(self, samples: int = 64, *, seed: int = 0) -> Trace:
        """See ``tfscale.curvature.trace``."""
        return trace.hutchinson(self, samples, seed)

    def eigenvalues(self, top: int = 1, bottom: int = 0, *, seed: int = 0) -> Eigenvalues:
        """See ``tfscale.curvature.eigenvalues``."""
        return eigenvalues.lanczos(self, top, bottom, seed=seed)
