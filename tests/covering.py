"""Samples of grids, in place of products that take hours; the products are marked ``full``.

What breaks on a grid nearly always breaks for some pair of values: this schedule with that wire,
this wire at that size. So a sample has each value of an axis together with each value of each
other axis at least once. A seed draws it, the same one every time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import pytest

SEED = 1


def _equal(row: Any) -> float:
    return 0


def cover(
    rows: Iterable[Any],
    aspects: Callable[[Any], Collection[Hashable]],
    seed: int = SEED,
    cost: Callable[[Any], float] = _equal,
) -> list[Any]:
    """Some of the rows, in their order, which have every aspect that any row has.

    Of rows that add as many aspects, the one with the lowest cost is taken.
    """
    rows = list(rows)
    dice = random.Random(seed)
    drawn = dice.sample(range(len(rows)), len(rows))
    of_row = [set(aspects(row)) for row in rows]
    missing, taken = set().union(*of_row), set()
    while missing:
        best = max(drawn, key=lambda i: (len(of_row[i] & missing), -cost(rows[i])))
        taken.add(best)
        missing -= of_row[best]
    return [row for i, row in enumerate(rows) if i in taken]


def pairs(row: Sequence[Any]) -> list[Hashable]:
    """Each two values of a row, with their places."""
    return list(itertools.combinations(enumerate(map(repr, row)), 2))


def singles(row: Sequence[Any]) -> list[Hashable]:
    """Each value of a row, with its place."""
    return list(enumerate(map(repr, row)))


def params(
    rows: Iterable[Any],
    aspects: Callable[[Any], Collection[Hashable]] = pairs,
    cost: Callable[[Any], float] = _equal,
) -> list[Any]:
    """All rows, for ``pytest.mark.parametrize``: those outside of a sample are marked full."""
    rows = list(rows)
    sample = cover(rows, aspects, cost=cost)
    return [
        pytest.param(*row, marks=[] if any(row is each for each in sample) else pytest.mark.full)
        for row in rows
    ]


def grid(
    names: str, *axes: Iterable[Any], aspects: Callable[[Any], Collection[Hashable]] = pairs
) -> pytest.MarkDecorator:
    """A test on the product of axes: on a sample in ``make test``, on all in ``make test-all``."""
    return pytest.mark.parametrize(names.split(", "), params(itertools.product(*axes), aspects))
