"""The loss around a model's variables: its sharpness, and its values along some directions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from tfscale.analysis.curvature.results import Eigenvalues, Result
from tfscale.support import figures


class Surroundings(Protocol):
    """A model's loss as a function of its variables, and the matrix that curves it."""

    variables: list[Any]
    size: int

    @property
    def loss(self) -> float:
        """The loss at the variables."""

    @property
    def gradient(self) -> np.ndarray:
        """The gradient at the variables."""

    def loss_at(self, moved: np.ndarray) -> float:
        """Return the loss at the variables plus a vector."""

    def gradient_at(self, moved: np.ndarray) -> np.ndarray:
        """Return the gradient at the variables plus a vector."""

    def flat(self, values: Sequence[Any]) -> np.ndarray:
        """Return arrays as one vector."""

    def eigenvalues(self, top: int = 1, **options: Any) -> Eigenvalues:
        """Return the largest eigenvalues of the matrix, with their vectors."""

    def telling(self, what: str, steps: int, of: str) -> AbstractContextManager[None]:
        """Show the progress while the block runs."""


@dataclasses.dataclass(frozen=True)
class Sharpness(Result):
    """Three measures of how fast the loss rises around a model's variables.

    Args:
        eigenvalue: the largest eigenvalue.
        sam: rise of the loss after one step of length ``rho`` along the gradient.
        keskar: largest rise of the loss within a box, in percent of 1 + loss; a lower bound.
        loss: the loss at the variables.
        rho: the radius that was given.
        epsilon: the size of the box that was given.
    """

    eigenvalue: float
    sam: float
    keskar: float
    loss: float
    rho: float
    epsilon: float

    def __str__(self) -> str:
        return (
            f"sharpness: largest eigenvalue {self.eigenvalue:.6g}, SAM (rho={self.rho:g}) "
            f"{self.sam:.4g}, Keskar (epsilon={self.epsilon:g}) {self.keskar:.4g}"
        )


def sharpness(
    operator: Surroundings,
    rho: float = 0.05,
    epsilon: float = 1e-3,
    steps: int = 10,
    **options: Any,
) -> Sharpness:
    r"""Measure how sharp the loss is around the variables.

    - The largest eigenvalue of the operator.
    - **SAM's**: :math:`L(w + \rho\, g / \|g\|) - L(w)`, which is the largest rise within a ball of
      radius :math:`\rho`, to first order.
    - **Keskar's**: :math:`100\, (\max_{z \in C} L(w + z) - L(w)) / (1 + L(w))`, in the box
      :math:`C: |z_i| \le \epsilon (|w_i| + 1)`. The maximum is searched in ``steps`` steps along
      the signs of the gradient, each of a quarter of the box. So the result is a lower bound.

    Args:
        operator: an operator over variables of a model.
        rho: radius of the ball.
        epsilon: size of the box.
        steps: number of steps along the gradient, within the box.
        options: options of ``eigenvalues``.

    Reference: Foret, Kleiner, Mobahi, Neyshabur, Sharpness-Aware Minimization,
    https://arxiv.org/abs/2010.01412; Keskar, Mudigere, Nocedal, Smelyanskiy, Tang, On Large-Batch
    Training, https://arxiv.org/abs/1609.04836.
    """
    loss, gradient = operator.loss, operator.gradient
    norm = float(np.linalg.norm(gradient))
    sam = operator.loss_at(rho * gradient / norm) - loss if norm else 0.0
    box = epsilon * (np.abs(operator.flat(operator.variables)) + 1)
    moved, highest = np.zeros(operator.size), loss
    for _ in range(steps):
        moved = np.clip(moved + box / 4 * np.sign(gradient), -box, box)
        highest = max(highest, operator.loss_at(moved))
        gradient = operator.gradient_at(moved)
    (largest,) = operator.eigenvalues(top=1, **options).top
    keskar = 100 * (highest - loss) / (1 + loss)
    return Sharpness(largest, sam, keskar, loss, rho, epsilon)


@dataclasses.dataclass(frozen=True)
class Landscape(Result):
    """The loss along one direction or two.

    Args:
        distances: distances from the variables, along each direction.
        losses: along one direction a row; along two, a row for each distance along the first.
        directions: names of the directions, for the plot.
    """

    distances: tuple[float, ...]
    losses: tuple[Any, ...]
    directions: tuple[str, ...]

    def plot(self) -> Any:
        """Plot the losses; return a matplotlib figure. Needs matplotlib."""
        figure = figures.figure(6, 4 if len(self.directions) == 1 else 5)
        axes = figure.add_subplot()
        if len(self.directions) == 1:
            axes.plot(self.distances, self.losses)
            axes.set(xlabel=self.directions[0], ylabel="loss")
        else:
            filled = axes.contourf(
                self.distances, self.distances, np.transpose(self.losses), levels=20
            )
            figure.colorbar(filled, label="loss")
            axes.set(xlabel=self.directions[0], ylabel=self.directions[1], aspect="equal")
        axes.axvline(0, color="gray", linewidth=0.5)
        return figure

    def __str__(self) -> str:
        losses = np.array(self.losses)
        return (
            f"loss along {' and '.join(self.directions)}, up to {max(self.distances):g} away: from "
            f"{losses.min():.6g} to {losses.max():.6g}"
        )


def landscape(
    operator: Surroundings,
    along: int | Sequence[Any] = 1,
    *,
    radius: float = 1.0,
    points: int = 21,
    **options: Any,
) -> Landscape:
    """Compute the loss along eigenvectors or others; each point costs a pass over the data.

    Args:
        operator: an operator over variables of a model.
        along: 1 or 2, for the eigenvectors of the largest eigenvalues; or one or two vectors, which
            are scaled to length 1.
        radius: largest distance, in both directions.
        points: number of points on each axis.
        options: options of ``eigenvalues``.
    """
    if isinstance(along, int):
        found = operator.eigenvalues(top=along, **options)
        vectors = list(found.vectors)
        names = [f"eigenvector of {value:.4g}" for value in found.top]
    else:
        vectors = [np.asarray(v, np.float64) / np.linalg.norm(v) for v in along]
        names = [f"direction {i + 1}" for i in range(len(vectors))]
    if len(vectors) not in (1, 2):
        raise ValueError(f"a landscape needs one or two directions; got {len(vectors)}")
    distances = np.linspace(-radius, radius, points)
    with operator.telling("landscape", points ** len(vectors), "losses"):
        losses = np.array(
            [
                operator.loss_at(sum(d * v for d, v in zip(each, vectors, strict=True)))
                for each in itertools.product(distances, repeat=len(vectors))
            ]
        ).reshape([points] * len(vectors))
    rows = losses.tolist()
    return Landscape(
        tuple(distances.tolist()),
        tuple(rows if losses.ndim == 1 else map(tuple, rows)),
        tuple(names),
    )
