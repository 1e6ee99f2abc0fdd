"""The density of a matrix's eigenvalues."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tfscale import figures
from tfscale.curvature.lanczos import Basis
from tfscale.curvature.results import Estimate, Result
from tfscale.curvature.samples import random_signs

if TYPE_CHECKING:
    from tfscale.curvature.operator import Operator

_POINTS = 512  # of a picture


@dataclasses.dataclass(frozen=True)
class Density(Result):
    """How many eigenvalues are where: for each random vector a sum of weighted points.

    Args:
        size: rows of the matrix.
        nodes: of each vector, the points.
        weights: of each vector, their weights, which add up to 1.
        products: how many products it took.
    """

    size: int
    nodes: tuple[tuple[float, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    products: int

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest node."""
        return min(map(min, self.nodes)), max(map(max, self.nodes))

    def mean_of(self, function: Any) -> Estimate:
        """The mean of a function over all eigenvalues, with its standard error.

        Args:
            function: takes and returns arrays.
        """
        pairs = zip(self.nodes, self.weights, strict=True)
        return Estimate.of(np.array([function(np.array(x)) @ np.array(w) for x, w in pairs]))

    def share(self, above: float = -math.inf, below: float = math.inf) -> Estimate:
        """Which share of the eigenvalues is above one number and below another.

        A node stands for eigenvalues on both sides of it: half of its weight counts as below it,
        and between nodes the share rises evenly.
        """
        pairs = zip(self.nodes, self.weights, strict=True)
        each = [np.interp([above, below], x, _below(w), 0.0, 1.0) for x, w in pairs]
        return Estimate.of(np.array([high - low for low, high in each]))

    def at(self, points: Any, width: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The density at some points, and its standard errors.

        Args:
            points: numbers.
            width: of the normal distribution that is put in each node's place; by default a
                hundredth of the distance of the ends.
        """
        low, high = self.ends
        width = width or (high - low) / 100 or 1.0
        each = [self.mean_of(lambda x, p=p: _normal(p - x, width)) for p in np.ravel(points)]
        return np.array([e.value for e in each]), np.array([e.error for e in each])

    def plot(self, width: float | None = None) -> Any:
        """A figure (of matplotlib, which must be installed) of the density, on a logarithmic scale.

        Args:
            width: as for ``at``.
        """
        figure = figures.figure(7, 4)
        low, high = self.ends
        margin = (high - low) / 20 or 1.0
        points = np.linspace(low - margin, high + margin, _POINTS)
        values, errors = self.at(points, width)
        axes = figure.add_subplot()
        axes.fill_between(points, values - errors, values + errors, alpha=0.3, linewidth=0)
        axes.plot(points, values)
        axes.set(xlabel="eigenvalue", ylabel="density", yscale="log")
        axes.set_ylim(max(1e-7, values[values > 0].min()), 2 * values.max())
        return figure

    def __str__(self) -> str:
        low, high = self.ends
        negative = self.share(below=0.0)
        return (
            f"density of {self.size:,} eigenvalues from {low:.6g} to {high:.6g} "
            f"({self.products} products)\n  below zero: {negative}"
        )


def _below(weights: tuple[float, ...]) -> np.ndarray:
    """Of each node, the weight below it."""
    found: np.ndarray = np.cumsum(weights) - np.array(weights) / 2
    return found


def _normal(x: np.ndarray, width: float) -> np.ndarray:
    found: np.ndarray = np.exp(-0.5 * (x / width) ** 2) / (width * math.sqrt(2 * math.pi))
    return found


def density(operator: Operator, probes: int = 8, steps: int = 80, *, seed: int = 0) -> Density:
    r"""The density of eigenvalues, by stochastic Lanczos quadrature.

    For a function f and a vector z of random signs, :math:`E[z^T f(H) z] / n` is the mean of f over
    all eigenvalues. Lanczos's method of m steps from z gives points and weights that reproduce
    :math:`z^T f(H) z / n` for polynomials up to degree :math:`2m - 1`. Errors are from the spread
    over vectors; what a small m leaves out is not in them.

    Args:
        operator: a symmetric matrix.
        probes: random vectors.
        steps: of each; that many products, and vectors in memory.
        seed: of the vectors.

    Reference: Ghorbani, Krishnan, Xiao, An Investigation into Neural Net Optimization via Hessian
    Eigenvalue Density, https://arxiv.org/abs/1901.10159.
    """
    if probes < 1 or steps < 1:
        raise ValueError(f"probes and steps are at least 1, got {probes!r} and {steps!r}")
    steps = min(steps, operator.size)
    operator.check_memory(steps + 1, "Lanczos's basis has")
    nodes, weights, products = [], [], 0
    with operator.telling("density", probes * steps):
        for probe in range(probes):
            basis = Basis(operator, steps, random_signs(operator, seed, probe), seed)
            while basis.count < steps and basis.rest:
                basis.grow()
            products += basis.count
            count = basis.count
            values, rotation = np.linalg.eigh(basis.projected[:count, :count])
            nodes.append(tuple(values.tolist()))
            weights.append(tuple((rotation[0] ** 2).tolist()))
    return Density(operator.size, tuple(nodes), tuple(weights), products)
