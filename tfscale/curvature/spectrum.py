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
_ROUNDING = 1e-6  # of the matrix's size: what it leaves in float32


@dataclasses.dataclass(frozen=True)
class Density(Result):
    """How many eigenvalues are where: for each random vector a sum of weighted points.

    Args:
        size: rows of the matrix.
        nodes: of each vector, the points.
        weights: of each vector, their weights, which add up to 1.
        residuals: of each vector, how far from each node an eigenvalue is, at most, with the signs
            that the ends of Lanczos's vectors have.
        products: how many products it took.
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
        """The mean of a function over all eigenvalues, with its standard error.

        Args:
            function: takes and returns arrays.
        """
        pairs = zip(self.nodes, self.weights, strict=True)
        return Estimate.of(np.array([function(np.array(x)) @ np.array(w) for x, w in pairs]))

    def share(self, above: float = -math.inf, below: float = math.inf) -> Estimate:
        """Which share of the eigenvalues is above one number and below another.

        Nodes and weights leave open how much is on which side of a number: what they say is
        sure lies between two bounds. The estimate is the middle, and its error has half of the
        distance besides the spread over vectors: more steps make that smaller. Eigenvalues that are
        that number but for rounding count half: for those at zero, ask for a number near it.

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


def _below(
    end: float, nodes: np.ndarray, weights: np.ndarray, residuals: np.ndarray
) -> tuple[float, float]:
    """Between what a vector's weight below a number lies: without and with a node that is there."""
    if math.isinf(end):
        return float(end > 0), float(end > 0)
    nodes, weights = _with_node(end, nodes, weights, residuals)
    there = np.abs(nodes - end) <= _ROUNDING * np.abs(nodes).max()
    low = float(weights[(nodes < end) & ~there].sum())
    return low, low + float(weights[there].sum())


def _with_node(
    end: float, nodes: np.ndarray, weights: np.ndarray, residuals: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of one step more, of which one node is given (Gauss and Radau's rule)."""
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
