"""The best plans from the smallest to the largest size: what each further byte buys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from tfscale.analysis.quantize.plan import Plan, checked_widths, plan
from tfscale.analysis.quantize.program import InfeasibleError
from tfscale.analysis.quantize.study import Study
from tfscale.support import arguments, figures
from tfscale.support.sizes import in_words


@dataclasses.dataclass(frozen=True)
class Front:
    """Plans of which none is smaller and less sensitive than another, the smallest one first.

    Args:
        plans: the plans.
    """

    plans: tuple[Plan, ...]

    def draw(self) -> Any:
        """Draw sensitivity against size; return a matplotlib figure."""
        figure = figures.figure(6, 4)
        axes = figure.add_subplot()
        sizes = [one.bytes / 1e3 for one in self.plans]
        axes.step(sizes, [max(one.cost, 1e-30) for one in self.plans], where="post", marker="o")
        axes.set(xlabel="weights, kB", ylabel="sensitivity", yscale="log")
        return figure

    def __str__(self) -> str:
        return "\n".join(
            f"{in_words(one.bytes):>9}  sensitivity {one.cost:<9.3g}  "
            + " ".join(f"{bits:>2}" for bits in one.bits.values())
            for one in self.plans
        )


def front(
    study: Study, bits: Iterable[int] | None = None, *, points: int = 16, **options: Any
) -> Front:
    """Return the best plan for each of several sizes, from the smallest possible one to the widest.

    Each size is an integer program of its own, so each plan is optimal for its size. A plan that
    is not better than a smaller one is left out.

    Args:
        study: sensitivities, from ``quantize.sensitivity``.
        bits: widths that layers may have, as for ``quantize.plan``.
        points: number of sizes.
        options: other arguments of ``quantize.plan``, such as ``first``, ``ties`` or ``bops``.

    Example:
        >>> _ = model.fit(x, y, verbose=0)
        >>> study = tfscale.quantize.sensitivity(model, x, y, bits=(4, 8), samples=8)
        >>> found = tfscale.quantize.front(study, points=4)
        >>> [one.bytes for one in found.plans][0] == 520 / 2
        True
    """
    arguments.instance(study, "study", Study, "a study of quantize.sensitivity")
    points = arguments.whole(points, "points", 2, 1000, what="a number of sizes")
    if (size := options.pop("size", None)) is not None:
        expected = "no argument of quantize.front, which makes a plan of each size"
        raise arguments.wrong(size, "size", expected)
    widths = checked_widths(bits, study)
    widest = plan(study, widths, size=1e17, **options)
    try:
        smallest = plan(study, widths, size=1, **options).bytes
    except InfeasibleError as error:
        smallest = error.smallest["size"]
    found: list[Plan] = []
    smallest = max(smallest, 1)  # a few weights of 2 bits take less than a byte
    for size in np.geomspace(smallest, max(widest.bytes, smallest), points):
        one = plan(study, widths, size=float(size) * (1 + 1e-12), **options)
        if not found or one.cost < found[-1].cost:
            found.append(one)
    return Front(tuple(found))
