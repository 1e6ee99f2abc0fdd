"""The wires by name: the formats in which numbers are sent (docs/wires.md)."""

from __future__ import annotations

import math

from tfscale.names import unknown

BITS = {
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4,
    "ternary": 2,
    "sign": 1,
}
WIRES = tuple(BITS)
_WITHOUT_SCALES = ("fp32", "bf16")
BLOCK = 256  # numbers that share a scale of four bytes

# The one wire that carries every type as it is.
LOSSLESS = "fp32"

# What the other wires carry, as float32.
FLOATS = ("float32", "float16", "bfloat16", "float64")


def checked(wire: str) -> str:
    """The same name, if there is a wire of that name."""
    if wire not in WIRES:
        raise unknown("wire", wire, WIRES)
    return wire


def nbytes(wire: str, size: int) -> int:
    """How many bytes a wire format makes of so many float32 numbers."""
    scales = 0 if wire in _WITHOUT_SCALES else 4 * math.ceil(size / BLOCK)
    return math.ceil(size * BITS[wire] / 8) + scales
