r"""Nets of a space as sums of effects, :math:`s \approx s_0 + \sum_b e_{b c_b}`, of their choices.

The nets to be trained shortly are those whose sums are the least certain: each next net has the
largest variance :math:`r^T (R^T R + \lambda)^{-1} r`, where the rows of :math:`R` are the nets
chosen before. This maximizes the determinant of :math:`R^T R`, one net after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfscale.analysis.quantize.program import Program, Resource

_RIDGE = 0.01  # keeps effects small that the trained nets do not tell apart
_CHANCE = 0.3  # of the logarithm of the variance: seeds begin with different nets

Choices = Mapping[str, Any]


class Design:
    """Choices as numbers, and what they say of the figures of nets.

    Args:
        blocks: for each block, its choices and their seconds.
        latency: largest sum of seconds.
        nets: all nets of the space.
    """

    def __init__(
        self, blocks: Mapping[str, Choices], latency: float, nets: Sequence[dict[str, Any]]
    ) -> None:
        self._blocks = {block: list(choices) for block, choices in blocks.items()}
        # The program chooses widths, which are numbers: a choice's number is its place.
        self._uses = [dict(enumerate(choices.values())) for choices in blocks.values()]
        self._limit = Resource("latency", self._uses, latency, "{:.4g} s".format)
        Program(self._uses, [self._limit]).solve()  # raises if the fastest net is too slow
        self._inside = [net for net in nets if self._limit.has_room(self._places(net))]
        self._rows = np.array([self._row(net) for net in self._inside])
        # Number of effects that the nets within the limit can tell.
        self.rank = int(np.linalg.matrix_rank(self._rows))

    def seconds(self, net: Choices) -> float:
        """Return the sum of a net's seconds."""
        return self._limit.used(self._places(net))

    def telling(self, count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
        """Return nets within the limit, each the least certain one given those before it."""
        count = min(count, len(self._inside))
        known = _RIDGE * np.eye(self._rows.shape[1])
        chosen: list[int] = []
        for _ in range(count):
            variance = np.einsum("ij,ji->i", self._rows, np.linalg.solve(known, self._rows.T))
            worth = np.log1p(variance) + _CHANCE * rng.random(len(variance))
            worth[chosen] = -np.inf
            chosen.append(int(worth.argmax()))
            known += np.outer(self._rows[chosen[-1]], self._rows[chosen[-1]])
        return [self._inside[i] for i in chosen]

    def effects(self, nets: Sequence[Choices], figures: Sequence[float]) -> np.ndarray:
        """Return the mean figure, and the effect of each choice of each block."""
        rows = np.array([self._row(net) for net in nets])
        penalty = _RIDGE * np.eye(rows.shape[1])
        penalty[0, 0] = 0
        return np.linalg.solve(rows.T @ rows + penalty, rows.T @ np.asarray(figures, float))

    def predicted(self, effects: np.ndarray, net: Choices) -> float:
        """Return the figure that a sum of effects predicts."""
        return float(self._row(net) @ effects)

    def best(self, effects: np.ndarray, count: int) -> list[dict[str, Any]]:
        """Return the nets within the limit with the largest sums of effects."""
        costs, begin = [], 1
        for choices in self._blocks.values():
            mine = effects[begin : begin + len(choices)]
            costs.append(dict(enumerate((mine.max() - mine).tolist())))
            begin += len(choices)
        found = Program(costs, [self._limit]).solutions(count)
        return [self._net(one.bits) for one in found]

    def _row(self, net: Choices) -> np.ndarray:
        parts = [
            np.eye(len(choices))[place]
            for choices, place in zip(self._blocks.values(), self._places(net), strict=True)
        ]
        return np.concatenate([[1.0], *parts])

    def _places(self, net: Choices) -> list[int]:
        return [choices.index(net[block]) for block, choices in self._blocks.items()]

    def _net(self, places: Sequence[int]) -> dict[str, Any]:
        pairs = zip(self._blocks.items(), places, strict=True)
        return {block: choices[place] for (block, choices), place in pairs}
