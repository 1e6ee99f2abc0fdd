"""A symmetric matrix that is known by its products with vectors."""

from __future__ import annotations

import abc
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

_LARGE = 100_000_000  # bytes; larger allocations are logged


class SymmetricMatrix(abc.ABC):
    """A symmetric matrix that is known by its products with vectors.

    A vector is an array of ``size`` numbers: the variables, one after the other.

    Args:
        parts: for each variable's path, its place in a vector.
        dtype: type of stored vectors; products are summed in float64.
        memory: largest number of bytes that stored vectors may take.
    """

    def __init__(
        self, parts: Mapping[str, slice], dtype: Any = np.float64, memory: int = 2_000_000_000
    ) -> None:
        self.parts = dict(parts)
        self.size = max((part.stop for part in self.parts.values()), default=0)
        self.dtype = np.dtype(dtype)
        self.memory = memory

    @abc.abstractmethod
    def products(self, vectors: np.ndarray) -> np.ndarray:
        """Return the products with the rows of ``vectors``, as rows in float64."""

    @property
    def name(self) -> str:
        """The operator's name in messages."""
        return f"the {type(self).__name__}"

    @staticmethod
    def layer_of(path: str) -> str:
        """Return the layer that a variable belongs to."""
        return path.rpartition("/")[0] or path

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns."""
        return self.size, self.size

    def __matmul__(self, v: Any) -> Any:
        """Multiply by a vector, or by the columns of a matrix."""
        v = np.asarray(v)
        if v.ndim not in (1, 2) or v.shape[0] != self.size:
            raise ValueError(
                f"a vector for {self.name} has {self.size} numbers, got an array of shape {v.shape}"
            )
        rows: np.ndarray = self.products(np.atleast_2d(v.T))
        return rows.reshape(-1) if v.ndim == 1 else rows.T

    def as_linear_operator(self) -> Any:
        """Return the operator as a ``scipy.sparse.linalg.LinearOperator``."""
        try:
            from scipy.sparse.linalg import LinearOperator
        except ImportError as error:
            raise ImportError(
                "as_linear_operator() is for scipy, which is not installed: pip install scipy"
            ) from error
        product = self.__matmul__
        return LinearOperator(
            self.shape, dtype=np.float64, matmat=product,
            matvec=lambda v: product(v.reshape(-1)), rmatvec=lambda v: product(v.reshape(-1)),
        )  # fmt: skip

    def telling(
        self, what: str, steps: int, of: str = "products"
    ) -> contextlib.AbstractContextManager[None]:
        """Show the user the progress while the block runs; the base class shows nothing."""
        return contextlib.nullcontext()

    def check_memory(self, vectors: int, who: str, least: int | None = None) -> int:
        """Return how many vectors fit into memory; raise if fewer than ``least`` do.

        Args:
            vectors: best number of vectors.
            who: subject and verb of the message, such as "Lanczos's basis has".
            least: smallest number of vectors that suffices; by default ``vectors``.
        """
        each = self.size * self.dtype.itemsize
        fitting = min(vectors, int(self.memory // each))
        least = vectors if least is None else min(least, vectors)
        if fitting < least:
            raise ValueError(
                f"{who} {least} vectors of {self.size:,} numbers, {least * each / 1e9:.3g} GB, and "
                f"memory={self.memory / 1e9:.3g} GB: raise memory, or ask for less"
            )
        if fitting * each > _LARGE:
            logging.getLogger("tfscale").info(
                "%s %d vectors of %s numbers: %.3g GB",
                who, fitting, f"{self.size:,}", fitting * each / 1e9,
            )  # fmt: skip
        return fitting
