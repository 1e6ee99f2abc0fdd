"""Layers on grids of processes: "Integrated Model, Batch and Domain Parallelism" (SPAA 2018).

``rows * columns`` processes hold a layer: each column of the grid works on a part of the batch,
and the processes of one column split the layer's weights (1.5D) or the height of its images
(domain). Formulas and constants are those of Gholami, Azad, Jin, Keutzer and Buluc.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from tfscale.collectives import Link
from tfscale.support import arguments

BYTES = 4  # of a float32


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer as the paper sees it.

    Args:
        name: name of the layer.
        weights: number of weights.
        outputs: number of activations per sample that the layer makes.
        halo: numbers per sample that a process needs of one neighbour if the height is split:
            in the forward pass, and in the backward pass; None if the height cannot be split.
    """

    name: str
    weights: int
    outputs: int
    halo: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Grid:
    """The grid of processes on which one layer is laid out.

    Args:
        rows: processes that share the samples of one column.
        columns: parts into which the batch is cut.
        domain: whether the rows split the height of images, not the weights.
    """

    rows: int
    columns: int
    domain: bool = False

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}{' domain' if self.domain else ''}"


def gather_seconds(ranks: int, nbytes: float, link: Link) -> float:
    """Return the time of an all-gather of ``nbytes`` in all; an all-reduce takes twice as long."""
    return link.alpha * math.ceil(math.log2(ranks)) + link.beta * nbytes * (ranks - 1) / ranks


def layer_seconds(before: Layer | None, layer: Layer, grid: Grid, batch: int, link: Link) -> float:
    """Return the communication time of a layer in one step.

    Args:
        before: the layer before; None for the first one, which needs no gradient of its input.
        layer: the layer.
        grid: how the layer is laid out.
        batch: number of samples in the global batch.
        link: the network.
    """
    samples = BYTES * batch / grid.columns
    if grid.domain:
        assert layer.halo is not None
        ranks = grid.rows * grid.columns
        halos = sum(link.seconds(samples * numbers) for numbers in layer.halo)
        return halos + 2 * gather_seconds(ranks, BYTES * layer.weights, link)
    seconds = gather_seconds(grid.rows, samples * layer.outputs, link)
    if before is not None:
        seconds += 2 * gather_seconds(grid.rows, samples * before.outputs, link)
    weights = BYTES * layer.weights / grid.rows
    return seconds + 2 * gather_seconds(grid.columns, weights, link)


def seconds(layers: Sequence[Layer], grids: Sequence[Grid], batch: int, link: Link) -> float:
    """Return the communication time of a model in one step, with one grid per layer.

    Example:
        >>> layers = [Layer("fc6", 37_748_736, 4096), Layer("fc7", 16_777_216, 4096)]
        >>> link = Link(alpha=2e-6, beta=1 / 6e9)
        >>> print(round(1e3 * seconds(layers, [Grid(1, 64)] * 2, 2048, link), 1), "ms")
        71.6 ms
        >>> print(round(1e3 * seconds(layers, [Grid(8, 8)] * 2, 2048, link), 1), "ms")
        10.4 ms
    """
    before = [None, *layers[:-1]]
    return sum(
        layer_seconds(one, layer, grid, batch, link)
        for one, layer, grid in zip(before, layers, grids)
    )


def grids_of(ranks: int, batch: int, layer: Layer) -> Iterable[Grid]:
    """Yield all grids on which a layer can be laid out, with one sample or more per column."""
    for rows in divisors(ranks):
        if ranks // rows <= batch:
            yield Grid(rows, ranks // rows)
            if rows > 1 and layer.halo is not None:
                yield Grid(rows, ranks // rows, domain=True)


def best_grids(layers: Sequence[Layer], ranks: int, batch: int, link: Link) -> list[Grid]:
    """Return the fastest grid of each layer.

    As in the paper, a change of the grid between layers costs nothing. So the layers are
    independent, and the result is the best of all combinations.
    """
    arguments.whole(ranks, "ranks", 1)
    arguments.whole(batch, "batch", 1)
    before = [None, *layers[:-1]]
    return [
        min(
            grids_of(ranks, batch, layer),
            key=lambda grid: layer_seconds(one, layer, grid, batch, link),
        )
        for one, layer in zip(before, layers)
    ]


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in order."""
    low = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*low, *(number // one for one in low)})
