"""Traces and diagonals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tfscale.curvature.results import Estimate, Trace

if TYPE_CHECKING:
    from tfscale.curvature.operator import Operator


def random_signs(operator: Operator, seed: int, sample: int) -> np.ndarray:
    """A probe: the same on all workers."""
    rng = np.random.default_rng([seed, sample])
    return rng.integers(0, 2, operator.size).astype(operator.dtype) * 2 - 1


def hutchinson(operator: Operator, samples: int, seed: int) -> Trace:
    """The mean of ``z^T H z`` over random signs z."""
    terms: list[dict[str, float]] = []
    for sample in range(samples):
        z = random_signs(operator, seed, sample)
        products = z * operator.products(z[np.newaxis])[0]
        terms.append({path: products[part].sum() for path, part in operator.parts.items()})
    by_layer: dict[str, Any] = {}
    for path in operator.parts:
        each = np.array([term[path] for term in terms])
        layer = path.rpartition("/")[0] or path
        by_layer[layer] = by_layer.get(layer, 0) + each
    return Trace(
        _estimate(np.sum(list(by_layer.values()), 0)),
        {layer: _estimate(each) for layer, each in by_layer.items()},
    )


def _estimate(each: np.ndarray) -> Estimate:
    error = each.std(ddof=1) / np.sqrt(len(each)) if len(each) > 1 else float("nan")
    return Estimate(float(each.mean()), float(error), len(each))
