"""The matrix as estimators see it: products with vectors."""

from __future__ import annotations

import abc
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfscale.analysis.curvature import eigenvalues, spectrum
from tfscale.analysis.curvature import samples as sampling
from tfscale.analysis.curvature.results import Diagonal, Eigenvalues, Estimate, Trace
from tfscale.analysis.curvature.spectrum import Density
from tfscale.support import arguments

_LARGE = 100_000_000  # bytes; larger allocations are logged

_TRACES: dict[str, Any] = {"hutchinson": sampling.hutchinson, "hutch++": sampling.hutch_plus_plus}
_EIGENVALUES: dict[str, Any] = {"lanczos": eigenvalues.lanczos, "power": eigenvalues.block_power}


class Operator(abc.ABC):
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

    def trace(
        self, samples: int = 64, *, method: str = "hutchinson", seed: int = 0, **options: Any
    ) -> Trace:
        """Estimate the trace and its standard error; ``"hutchinson"`` also estimates each layer's.

        Args:
            samples: largest number of products.
            method: ``"hutchinson"`` or ``"hutch++"``.
            seed: seed of the random vectors.
            options: for ``"hutchinson"``, ``accuracy``: stop when the standard error is at most
                this share of the trace.
        """
        find = _by_name(_TRACES, method)
        found: Trace = find(self, samples, seed=seed, **options)
        return found

    def diagonal(self, samples: int = 64, *, seed: int = 0) -> Diagonal:
        """Estimate the diagonal, with standard errors; see ``samples.diagonal``."""
        return sampling.diagonal(self, samples, seed=seed)

    def frobenius(self, samples: int = 64, *, seed: int = 0) -> Estimate:
        """Estimate the Frobenius norm, with its standard error."""
        return sampling.frobenius(self, samples, seed=seed)

    def eigenvalues(
        self, top: int = 1, bottom: int = 0, *, method: str = "lanczos", **options: Any
    ) -> Eigenvalues:
        """Return eigenvalues at the ends of the spectrum, and their vectors.

        Args:
            top: number of the largest eigenvalues.
            bottom: number of the smallest (most negative) eigenvalues.
            method: ``"lanczos"``, or ``"power"``, which is slow and simple.
            options: ``tolerance``: bound on the residuals, as a share of the largest absolute
                eigenvalue (1e-4); ``limit``: largest number of products; ``seed``.
        """
        find = _by_name(_EIGENVALUES, method)
        found: Eigenvalues = find(self, top, bottom, **options)
        return found

    def density(self, probes: int = 8, steps: int = 80, *, seed: int = 0) -> Density:
        """Estimate the density of eigenvalues; see ``tfscale.analysis.curvature.spectrum``.

        Args:
            probes: number of random vectors.
            steps: steps of Lanczos's method for each vector.
            seed: seed of the vectors.
        """
        return spectrum.density(self, probes, steps, seed=seed)

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


def _by_name(known: Mapping[str, Any], method: str) -> Any:
    return known[arguments.choice(method, "method", tuple(known))]
