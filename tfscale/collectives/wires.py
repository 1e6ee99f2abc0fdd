"""The wires: the formats in which numbers are sent, with their properties (docs/wires.md).

This is the only table in Python. ``custom_ops/wire/facts.h`` has the C++ table, and
``tests/test_wires.py`` compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from tfscale.support import arguments

BLOCK = 256  # numbers that share a scale
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Error:
    """Upper bound of a wire's rounding error for one number.

    In a block with the largest absolute value A, the bound for a number x is the largest of
    ``least``, ``|x| / of_number`` and ``A / of_block + A / of_floats``.
    """

    least: float = 0
    of_number: float = inf
    of_block: float = inf
    of_floats: float = inf  # error of float arithmetic


@dataclass(frozen=True)
class WireFormat:
    """The properties of a wire.

    Attributes:
        name: the name that users pass.
        bits: bits for each number.
        block: how many numbers share a scale; None if the wire has no scales.
        nearest: the error of rounding to nearest.
        stochastic: the error of stochastic rounding, if the wire supports it.
        at_random: whether the wire uses stochastic rounding by default if no residual returns the
            error. Such rounding needs a new seed in each step.
    """

    name: str
    bits: int
    block: int | None
    nearest: Error
    stochastic: Error | None = None
    at_random: bool = False

    @property
    def lossless(self) -> bool:
        """Whether the wire carries every type unchanged."""
        return self.nearest == Error()

    @property
    def feedback(self) -> bool:
        """Whether the wire uses error feedback by default."""
        return self.bits < 8  # the error of one step is too large to be lost

    @property
    def keeps_zeros(self) -> bool:
        """Whether a zero arrives as zero: a single bit can only say plus or minus."""
        return self.bits > 1

    def rounds_at_random(self, with_residual: bool) -> bool:
        """Return whether the wire rounds at random by default, with or without a residual."""
        return self.at_random and not with_residual

    @property
    def unaided(self) -> Error:
        """The error of one rounding, by default without error feedback."""
        return self.stochastic if self.stochastic and self.at_random else self.nearest


FORMATS = {
    one.name: one
    for one in (
        WireFormat("fp32", 32, None, Error()),
        WireFormat("bf16", 16, None, Error(2**-134, 2**8), Error(2**-133, 2**7)),
        WireFormat("fp16", 16, BLOCK, Error(2**-127, 2**11, 2**39)),
        WireFormat("fp8", 8, BLOCK, Error(2**-127, 2**4, 229376)),
        WireFormat(
            "int8", 8, BLOCK, Error(2**-118, inf, 254, 2**21), Error(2**-118, inf, 127, 2**21)
        ),
        WireFormat(
            "int4", 4, BLOCK, Error(2**-118, inf, 14, 2**21), Error(2**-118, inf, 7, 2**21)
        ),
        WireFormat(
            "ternary", 2, BLOCK, Error(2**-118, inf, 2, 2**21), Error(2**-118, inf, 1, 2**21),
            at_random=True,
        ),
        WireFormat("sign", 1, BLOCK, Error(2**-126, inf, 1)),
    )
}  # fmt: skip
WIRES = tuple(FORMATS)
(LOSSLESS,) = (one.name for one in FORMATS.values() if one.lossless)

# The types that wires other than the lossless one carry, as float32.
FLOATS = ("float32", "float16", "bfloat16", "float64")


def checked(wire: str, name: str = "wire") -> str:
    """Return the name of a wire, or raise; ``name`` is the name of the argument."""
    return arguments.choice(wire, name, WIRES)


def nbytes(wire: str, size: int) -> int:
    """Return how many bytes a wire format makes of this number of float32 values."""
    one = FORMATS[wire]
    scales = ceil(size / one.block) if one.block else 0
    return ceil(size * one.bits / 8) + _SCALE_BYTES * scales
