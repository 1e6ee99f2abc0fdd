"""Results of estimators: small records that print well and can be saved as JSON."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfscale.support import records

_UNSAVED: dict[str, Any] = {"saved": False}


class Result:
    """A record whose numbers are saved as JSON; eigenvectors and other long arrays are not."""

    def as_json(self) -> dict[str, Any]:
        """Return all numbers, in types that JSON knows."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {
            field.name: _plain(getattr(self, field.name))
            for field in fields
            if field.metadata.get("saved", True)
        }

    def save(self, path: str | Path) -> None:
        """Write a JSON file."""
        records.write(Path(path), {"kind": type(self).__name__, **self.as_json()})


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list, np.ndarray)):
        return [_plain(each) for each in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number that was estimated from random samples.

    Args:
        value: the mean over samples.
        error: the standard error of the mean; NaN for a single sample.
        samples: number of samples.
    """

    value: float
    error: float
    samples: int

    @classmethod
    def of(cls, samples: np.ndarray) -> Estimate:
        """Return the mean of samples, with its standard error."""
        count = len(samples)
        error = samples.std(ddof=1) / math.sqrt(count) if count > 1 else math.nan
        return cls(float(samples.mean()), float(error), count)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return an interval that holds the true number in this share of cases (by Student's t)."""
        half = self.error * student(confidence, self.samples - 1)
        return self.value - half, self.value + half

    def is_within(self, accuracy: float) -> bool:
        """Return whether the standard error is at most this share of the value."""
        return self.error <= accuracy * abs(self.value)

    def __str__(self) -> str:
        return f"{self.value:.6g} ± {self.error:.2g}"


def student(confidence: float, degrees: int) -> float:
    """Return the quantile of Student's t, which multiplies a standard error.

    Exact for 1 and 2 degrees of freedom, and by its expansion around the normal distribution
    (Abramowitz and Stegun 26.7.5), which is off by less than 1% from 3 degrees on.
    """
    p = (1 + confidence) / 2
    if degrees < 1:
        return math.nan
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    x = statistics.NormalDist().inv_cdf(p)
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return float(sum(term / degrees**power for power, term in enumerate(terms)))


@dataclasses.dataclass(frozen=True)
class Trace(Result):
    """The trace of a matrix, and of each layer's block on its diagonal.

    Args:
        total: trace of the whole matrix.
        layers: trace of each layer's block; empty with Hutch++.
        products: number of products.
    """

    total: Estimate
    layers: Mapping[str, Estimate]
    products: int

    @property
    def value(self) -> float:
        """The trace of the whole matrix."""
        return self.total.value

    def __str__(self) -> str:
        lines = [f"trace {self.total}  ({self.products} products)"]
        return "\n".join([*lines, *(f"  {name}: {one}" for name, one in self.layers.items())])


@dataclasses.dataclass(frozen=True)
class Diagonal(Result):
    """The diagonal of a matrix.

    Args:
        means: mean of each variable's diagonal.
        samples: number of samples.
        values: all numbers.
        errors: the standard errors of all numbers.
    """

    means: Mapping[str, float]
    samples: int
    values: np.ndarray = dataclasses.field(repr=False, compare=False, metadata=_UNSAVED)
    errors: np.ndarray = dataclasses.field(repr=False, compare=False, metadata=_UNSAVED)

    def __str__(self) -> str:
        lines = [f"diagonal ({self.samples} samples), means"]
        return "\n".join([*lines, *(f"  {path}: {mean:.6g}" for path, mean in self.means.items())])


@dataclasses.dataclass(frozen=True)
class Eigenvalues(Result):
    """Eigenvalues at the ends of a spectrum.

    Args:
        top: the largest eigenvalues, in descending order.
        bottom: the smallest (most negative) eigenvalues, in ascending order.
        residuals: the length of ``H v - e v`` for each eigenvalue e, those of ``top`` first. The
            matrix has an eigenvalue no farther than the residual from e.
        products: number of products.
        converged: whether all residuals are within the requested tolerance.
        vectors: eigenvectors of length 1, as rows.
    """

    top: tuple[float, ...]
    bottom: tuple[float, ...]
    residuals: tuple[float, ...]
    products: int
    converged: bool
    vectors: np.ndarray = dataclasses.field(repr=False, compare=False, metadata=_UNSAVED)

    @property
    def values(self) -> tuple[float, ...]:
        """The eigenvalues of ``top``, then those of ``bottom``."""
        return (*self.top, *self.bottom)

    def __str__(self) -> str:
        state = "" if self.converged else ", not converged"
        lines = [f"eigenvalues ({self.products} products{state})"]
        for name, values in (("top", self.top), ("bottom", self.bottom)):
            if values:
                lines.append(f"  {name}: {', '.join(f'{value:.6g}' for value in values)}")
        return "\n".join(lines)
