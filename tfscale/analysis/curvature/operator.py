"""A symmetric matrix with all estimators as its methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfscale.analysis.curvature import eigenvalues, samples as sampling, spectrum
from tfscale.analysis.curvature.matrix import SymmetricMatrix
from tfscale.analysis.curvature.results import Diagonal, Eigenvalues, Estimate, Trace
from tfscale.analysis.curvature.spectrum import Density
from tfscale.support import arguments

_TRACES: dict[str, Any] = {"hutchinson": sampling.hutchinson, "hutch++": sampling.hutch_plus_plus}
_EIGENVALUES: dict[str, Any] = {"lanczos": eigenvalues.lanczos, "power": eigenvalues.block_power}


class Operator(SymmetricMatrix):
    """A symmetric matrix whose trace, diagonal, norm and eigenvalues can be asked for."""

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


def _by_name(known: Mapping[str, Any], method: str) -> Any:
    return known[arguments.choice(method, "method", tuple(known))]
