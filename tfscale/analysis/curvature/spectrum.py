"""The density of a matrix's eigenvalues."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tfscale.analysis.curvature.lanczos import Basis
from tfscale.analysis.curvature.matrix import SymmetricMatrix
from tfscale.analysis.curvature.results import Estimate, Result
from tfscale.analysis.curvature.samples import random_signs
from tfscale.support import figures

_POINTS = 512  # points of a plot
_ROUNDING = 1e-6  # share of the matrix's size that float32 rounding leaves


@dataclasses.dataclass(frozen=True)
class Density(Result):
    """The distribution of eigenvalues: for each random vector, a set of weighted points.

    Args:
        size: number of rows of the matrix.
        nodes: points of each vector.
        weights: weights of each vector's points, which add up to 1.
        residuals: for each node of each vector, a bound on the distance to an eigenvalue, with the
            signs of the last components of Lanczos's vectors.
        products: number of products.
    """

    size: int
    nodes: tuple[tuple[float, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    residuals: tuple[tuple[float, ...], ...]
    products: int

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest node."""
        return min(map(min, self.nodes)), max(map(max, self.nodes))

    def mean_of(self, function: Any) -> Estimate:
        """Return the mean of a function over all eigenvalues, with its standard error.

        Args:
            function: a function that takes and returns arrays.
        """
        pairs = zip(self.nodes, self.weights, strict=True)
        return Estimate.of(np.array([function(np.array(x)) @ np.array(w) for x, w in pairs]))

    def share(self, above: float = -math.inf, below: float = math.inf) -> Estimate:
        """Return the share of the eigenvalues above one number and below another.

        Nodes and weights do not determine how much weight is on each side of a number. They give a
        lower and an upper bound. The estimate is the middle of the two. Its error combines half of
        their distance with the spread over vectors; more steps shrink the distance. Eigenvalues
        that equal the number up to rounding count half. To count eigenvalues at zero, ask for a
        number near zero.

        Reference: Golub, Meurant, Matrices, Moments and Quadrature with Applications, 2010.
        """
        rules = zip(self.nodes, self.weights, self.residuals, strict=True)
        bounds = np.array(
            [[_below(end, *map(np.array, rule)) for end in (above, below)] for rule in rules]
        )
        middles = bounds.mean(-1)
        found = Estimate.of(middles[:, 1] - middles[:, 0])
        open_ = float((bounds[..., 1] - bounds[..., 0]).sum(1).mean()) / 2
        return dataclasses.replace(found, error=math.hypot(found.error, open_))

    def at(self, points: Any, width: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the density at some points, and its standard errors.

        Args:
            points: numbers.
            width: standard deviation of the normal distribution that replaces each node; by default
                a hundredth of the distance between the ends.
        """
        low, high = self.ends
        width = width or (high - low) / 100 or 1.0
        each = [self.mean_of(lambda x, p=p: _normal(p - x, width)) for p in np.ravel(points)]
        return np.array([e.value for e in each]), np.array([e.error for e in each])

    def plot(self, width: float | None = None) -> Any:
        """Plot the density on a logarithmic scale; return a matplotlib figure. Needs matplotlib.

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


def _below(
    end: float, nodes: np.ndarray, weights: np.ndarray, residuals: np.ndarray
) -> tuple[float, float]:
    """Return bounds on a vector's weight below a number: without and with a node at that number."""
    if math.isinf(end):
        return float(end > 0), float(end > 0)
    nodes, weights = _with_node(end, nodes, weights, residuals)
    there = np.abs(nodes - end) <= _ROUNDING * np.abs(nodes).max()
    low = float(weights[(nodes < end) & ~there].sum())
    return low, low + float(weights[there].sum())


def _with_node(
    end: float, nodes: np.ndarray, weights: np.ndarray, residuals: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights after one more step, one node being given (Gauss-Radau rule)."""
    coupled = residuals != 0
    if np.any(nodes[coupled] == end):
        return nodes, weights
    arrow = np.zeros((len(nodes) + 1, len(nodes) + 1))
    np.fill_diagonal(
        arrow, [*nodes, end + np.sum(residuals[coupled] ** 2 / (nodes - end)[coupled])]
    )
    arrow[-1, :-1] = arrow[:-1, -1] = residuals
    found, vectors = np.linalg.eigh(arrow)
    return found, (np.sqrt(weights) @ vectors[:-1]) ** 2


def _normal(x: np.ndarray, width: float) -> np.ndarray:
    found: np.ndarray = np.exp(-0.5 * (x / width) ** 2) / (width * math.sqrt(2 * math.pi))
    return found


def density(
    operator: SymmetricMatrix, probes: int = 8, steps: int = 80, *, seed: int = 0
) -> Density:
    r"""Estimate the density of eigenvalues by stochastic Lanczos quadrature.

    For a function f and a vector z of random signs, :math:`E[z^T f(H) z] / n` is the mean of f over
    all eigenvalues. Lanczos's method of m steps from z gives points and weights that reproduce
    :math:`z^T f(H) z / n` for polynomials up to degree :math:`2m - 1`. Errors come from the spread
    over vectors; they do not include the error of a small m.

    Args:
        operator: a symmetric matrix.
        probes: number of random vectors.
        steps: steps for each vector; each step costs a product and a vector in memory.
        seed: seed of the vectors.

    Reference: Ghorbani, Krishnan, Xiao, An Investigation into Neural Net Optimization via Hessian
    Eigenvalue Density, https://arxiv.org/abs/1901.10159.
    """
    if probes < 1 or steps < 1:
        raise ValueError(f"probes and steps must be at least 1; got {probes!r} and {steps!r}")
    steps = min(steps, operator.size)
    operator.check_memory(steps + 1, "Lanczos's basis has")
    nodes, weights, residuals, products = [], [], [], 0
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
            residuals.append(tuple((np.sign(rotation[0]) * basis.rest * rotation[-1]).tolist()))
    return Density(operator.size, tuple(nodes), tuple(weights), tuple(residuals), products)
