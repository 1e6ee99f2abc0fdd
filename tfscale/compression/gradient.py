"""What is known of a gradient before there is one."""

from __future__ import annotations

import math
from dataclasses import dataclass

ELEMENT_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int32": 4,
    "int64": 8,
}


@dataclass(frozen=True)
class Gradient:
    """What is known of a variable's gradient before there is one.

    Args:
        path: of the variable, such as ``"dense/kernel"``.
        shape: of the variable, and so of its gradient.
        dtype: the name of its type, such as ``"float32"``.

    Example:
        >>> Gradient("dense/kernel", (512, 10), "float32").bytes
        20480
    """

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        if self.dtype not in ELEMENT_BYTES:
            raise TypeError(
                f"the gradient of {self.path} has type {self.dtype}; collectives take "
                f"{', '.join(ELEMENT_BYTES)}. Cast the variable, or reduce it yourself."
            )
        return self.elements * ELEMENT_BYTES[self.dtype]
