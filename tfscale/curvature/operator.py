"""What estimators ask of a matrix: its products with vectors."""

from __future__ import annotations

import abc
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfscale import arguments
from tfscale.curvature import eigenvalues, spectrum
from tfscale.curvature import samples as sampling
from tfscale.curvature.results import Diagonal, Eigenvalues, Estimate, Trace
from tfscale.curvature.spectrum import Density

_LARGE = 100_000_000  # bytes, of which it is said that they are taken

_TRACES: dict[str, Any] = {"hutchinson": sampling.hutchinson, "hutch++": sampling.hutch_plus_plus}
_EIGENVALUES: dict[str, Any] = {"lanczos": eigenvalues.lanczos, "power": eigenvalues.block_power}


class Operator(abc.ABC):
    """A symmetric matrix that is known by its products with vectors.

    A vector is an array of ``size`` numbers: those of all variables, one behind the other.

    Args:
        parts: where in a vector each variable is, by its path.
        dtype: in which vectors are kept; products are added up in float64.
        memory: bytes that many vectors together may take.
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
        """The products with vectors, each of which is a row: rows in float64."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"the {type(self).__name__}"

    @staticmethod
    def layer_of(path: str) -> str:
        """The layer that a variable belongs to."""
        return path.rpartition("/")[0] or path

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.size, self.size

    def __matmul__(self, v: Any) -> Any:
        """The product with a vector, or with the columns of a matrix."""
        v = np.asarray(v)
        if v.ndim not in (1, 2) or v.shape[0] != self.size:
            raise ValueError(
                f"a vector for {self.name} has {self.size} numbers, got an array of shape {v.shape}"
            )
        rows: np.ndarray = self.products(np.atleast_2d(v.T))
        return rows.reshape(-1) if v.ndim == 1 else rows.T

    def as_linear_operator(self) -> Any:
        """The same for scipy: a ``scipy.sparse.linalg.LinearOperator``."""
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
        """The trace, with its standard error, and with ``"hutchinson"`` that of each layer.

        Args:
            samples: products, at most.
            method: ``"hutchinson"`` or ``"hutch++"``.
            seed: of the random vectors.
            options: for ``"hutchinson"``, ``accuracy``: stop when the standard error is at most
                this share of the trace.
        """
        find = _by_name(_TRACES, method)
        found: Trace = find(self, samples, seed=seed, **options)
        return found

    def diagonal(self, samples: int = 64, *, seed: int = 0) -> Diagonal:
        """The diagonal, with standard errors; see ``tfscale.curvature.samples``."""
        return sampling.diagonal(self, samples, seed=seed)

    def frobenius(self, samples: int = 64, *, seed: int = 0) -> Estimate:
        """The Frobenius norm, with its standard error."""
        return sampling.frobenius(self, samples, seed=seed)

    def eigenvalues(
        self, top: int = 1, bottom: int = 0, *, method: str = "lanczos", **options: Any
    ) -> Eigenvalues:
        """Eigenvalues at the ends of the spectrum, and their vectors.

        Args:
            top: how many of the largest.
            bottom: how many of the smallest (most negative).
            method: ``"lanczos"``, or ``"power"``, which is slow and simple.
            options: ``tolerance``: what residuals may be, as a share of the largest eigenvalue's
                size (1e-4); ``limit``: products, at most; ``seed``.
        """
        find = _by_name(_EIGENVALUES, method)
        found: Eigenvalues = find(self, top, bottom, **options)
        return found

    def density(self, probes: int = 8, steps: int = 80, *, seed: int = 0) -> Density:
        """The density of eigenvalues; see ``tfscale.curvature.spectrum``.

        Args:
            probes: random vectors.
            steps: of Lanczos's method for each.
            seed: of the vectors.
        """
        return spectrum.density(self, probes, steps, seed=seed)

    def telling(
        self, what: str, steps: int, of: str = "products"
    ) -> contextlib.AbstractContextManager[None]:
        """While it lasts, the user is told how many steps are left, and of what."""
        return contextlib.nullcontext()

    def check_memory(self, vectors: int, who: str, least: int | None = None) -> int:
        """How many vectors there may be: all that are asked for, or at least ``least``.

        Args:
            vectors: how many would be best.
            who: keeps them, for messages: "Lanczos's basis has".
            least: how many it can do with; by default all.
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
