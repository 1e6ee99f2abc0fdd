"""The properties of a gradient that are known before there is one."""

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
    """The properties of a variable's gradient that are known before there is one.

    Args:
        path: path of the variable, such as ``"dense/kernel"``.
        shape: shape of the variable, and so of its gradient.
        dtype: name of the type, such as ``"float32"``.

    Example:
        >>> Gradient("dense/kernel", (512, 10), "float32").bytes
        20480
    """

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in memory."""
        if self.dtype not in ELEMENT_BYTES:
            raise TypeError(
                f"the gradient of {self.path} has type {self.dtype}, but collectives sum only "
                f"{', '.join(ELEMENT_BYTES)}. Give the variable one of these types, or sum its "
                "gradient yourself."
            )
        return self.elements * ELEMENT_BYTES[self.dtype]
