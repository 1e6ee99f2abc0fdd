"""The loss around a model's variables: how sharp it is, and how it looks along some directions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfscale import figures
from tfscale.curvature.results import Result

if TYPE_CHECKING:
    from tfscale.curvature.of_model import OfModel


@dataclasses.dataclass(frozen=True)
class Sharpness(Result):
    """Three measures of how fast the loss rises around a model's variables.

    Args:
        eigenvalue: the largest one.
        sam: by how much the loss rises one step up the gradient, of length ``rho``.
        keskar: by how many percent of 1 + loss it rises, at most, in a box: a lower bound.
        loss: where the variables are.
        rho: as given.
        epsilon: as given.
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
    operator: OfModel, rho: float = 0.05, epsilon: float = 1e-3, steps: int = 10, **options: Any
) -> Sharpness:
    r"""Measures of sharpness.

    - The largest eigenvalue of the operator.
    - **SAM's**: :math:`L(w + \rho\, g / \|g\|) - L(w)`, which is the largest rise within a ball
      of radius :math:`\rho`, to first order.
    - **Keskar's**: :math:`100\, (\max_{z \in C} L(w + z) - L(w)) / (1 + L(w))`, in the box
      :math:`C: |z_i| \le \epsilon (|w_i| + 1)`. The maximum is looked for in some steps up the
      gradient's signs, each of a quarter of the box, so what is found is a lower bound.

    Args:
        operator: over variables of a model.
        rho: the ball's radius.
        epsilon: the box's size.
        steps: up the gradient, within the box.
        options: for ``eigenvalues``.

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
        distances: how far from the variables, along each direction.
        losses: along one direction a row; along two, a row for each distance along the first.
        directions: what they are, for the picture.
    """

    distances: tuple[float, ...]
    losses: tuple[Any, ...]
    directions: tuple[str, ...]

    def plot(self) -> Any:
        """A figure (of matplotlib, which must be installed)."""
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
    operator: OfModel,
    along: int | Sequence[Any] = 1,
    *,
    radius: float = 1.0,
    points: int = 21,
    **options: Any,
) -> Landscape:
    """The loss along eigenvectors, or other directions; each point costs the loss of all data.

    Args:
        operator: over variables of a model.
        along: 1 or 2, for the eigenvectors of so many of the largest eigenvalues; or one or two
            vectors, whose lengths are made 1.
        radius: how far to go, to both sides.
        points: on each axis.
        options: for ``eigenvalues``.
    """
    if isinstance(along, int):
        found = operator.eigenvalues(top=along, **options)
        vectors = list(found.vectors)
        names = [f"eigenvector of {value:.4g}" for value in found.top]
    else:
        vectors = [np.asarray(v, np.float64) / np.linalg.norm(v) for v in along]
        names = [f"direction {i + 1}" for i in range(len(vectors))]
    if len(vectors) not in (1, 2):
        raise ValueError(f"a landscape is along one or two directions, got {len(vectors)}")
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
