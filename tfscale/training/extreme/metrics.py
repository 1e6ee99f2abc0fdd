"""Precision, recall and propensity-scored precision of the k best classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfscale.support import arguments


def propensities(counts: Any, *, a: float = 0.55, b: float = 1.5) -> Any:
    """Return for each class the probability that a true label of it is recorded.

    The model is that of Jain, Prabhu and Varma (KDD 2016): rare labels are missed most often.

    Args:
        counts: how many training samples each class has.
        a: slope of the model; 0.6 for products, 0.5 for Wikipedia.
        b: offset of the model; 2.6 for products, 0.4 for Wikipedia.

    Example:
        >>> tfscale.extreme.propensities([1, 1000]).round(2)
        array([0.14, 0.82])
    """
    a = arguments.real(a, "a", 0)
    b = arguments.real(b, "b", 0)
    expected = "a list with the number of training samples of each class"
    items = arguments.items(counts, "counts", expected, lambda v, n: arguments.real(v, n, 0))
    found = np.array(items, np.float64)
    scale = max((np.log(max(found.sum(), 3)) - 1) * (b + 1) ** a, 0)
    return 1 / (1 + scale * (found + b) ** -a)


class AtK:
    """Sums of a metric over batches, for several numbers k.

    Args:
        ks: numbers of classes that count, such as 1 and 5.
        propensity: None, or the propensity of each class, for propensity-scored precision.
    """

    def __init__(self, ks: Sequence[int], propensity: Any = None) -> None:
        self._ks, self._propensity = ks, None if propensity is None else np.asarray(propensity)
        self._samples = 0
        self._sums = {name: 0.0 for name in self._names()}

    def add(self, true: Any, found: Any) -> None:
        """Count a batch.

        Args:
            true: numbers of true classes [samples, n]; -1 where a sample has fewer.
            found: numbers of the best classes [samples, k], best first.
        """
        true = np.sort(true, axis=1)
        true[:, 1:][true[:, 1:] == true[:, :-1]] = -1  # a label that is given twice is one
        hits = (found[:, :, None] == true[:, None, :]).any(-1)
        counts = np.maximum((true >= 0).sum(1), 1)
        self._samples += len(true)
        for k in self._ks:
            right = hits[:, :k]
            self._sums[f"precision@{k}"] += right.sum() / k
            self._sums[f"recall@{k}"] += (right.sum(1) / counts).sum()
            if self._propensity is not None:
                gains = 1 / self._propensity
                self._sums[f"psp@{k}"] += (right * gains[found[:, :k]]).sum() / k
                best = np.where(true >= 0, gains[np.maximum(true, 0)], 0)
                self._sums[f"best@{k}"] += np.sort(best, axis=1)[:, ::-1][:, :k].sum() / k

    def result(self) -> dict[str, float]:
        """Return the metrics by name; propensity-scored precision as a part of the best one."""
        found = {name: float(total) / max(self._samples, 1) for name, total in self._sums.items()}
        for k in self._ks if self._propensity is not None else ():
            found[f"psp@{k}"] /= found.pop(f"best@{k}") or 1
        return found

    def _names(self) -> list[str]:
        scored = ["psp", "best"] if self._propensity is not None else []
        return [f"{name}@{k}" for name in ["precision", "recall", *scored] for k in self._ks]
