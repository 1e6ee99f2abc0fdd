"""What estimators return: small records that print well and are saved as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfscale import records


class Result:
    """A record whose numbers are saved as JSON; vectors are not."""

    def as_json(self) -> dict[str, Any]:
        """All numbers, in types that JSON knows."""
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
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number that was estimated.

    Args:
        value: the mean over samples.
        error: its standard error.
        samples: how many there were.
    """

    value: float
    error: float
    samples: int

    def __str__(self) -> str:
        return f"{self.value:.6g} ± {self.error:.2g}"


@dataclasses.dataclass(frozen=True)
class Trace(Result):
    """The trace of an operator, and that of each layer's block on its diagonal.

    Args:
        total: of the whole.
        layers: of each layer.
    """

    total: Estimate
    layers: Mapping[str, Estimate]

    @property
    def value(self) -> float:
        """Of the whole."""
        return self.total.value

    def __str__(self) -> str:
        lines = [f"trace {self.total} ({self.total.samples} samples)"]
        return "\n".join([*lines, *(f"  {name}: {one}" for name, one in self.layers.items())])


@dataclasses.dataclass(frozen=True)
class Eigenvalues(Result):
    """Eigenvalues at the ends of a spectrum.

    Args:
        top: the largest, from the largest on.
        bottom: the smallest (most negative), from the smallest on.
        residuals: of each of them, those of ``top`` first: the norm of ``H v - e v``, which bounds
            the error of e.
        products: how many it took.
        converged: whether all residuals are as small as they were to be.
        vectors: of each of them, as rows, of length 1.
    """

    top: tuple[float, ...]
    bottom: tuple[float, ...]
    residuals: tuple[float, ...]
    products: int
    converged: bool
    vectors: np.ndarray = dataclasses.field(repr=False, compare=False, metadata={"saved": False})

    @property
    def values(self) -> tuple[float, ...]:
        """Those of ``top``, then those of ``bottom``."""
        return (*self.top, *self.bottom)
