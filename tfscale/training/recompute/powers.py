"""Powers in both passes: TensorFlow writes them as products, and computes equal products once."""

from __future__ import annotations

from tfscale.training.recompute.traced_step import TracedStep


def merged_powers(step: TracedStep) -> dict[int, list[int]]:
    """Return the powers of the forward pass, each with the backward pass's powers of its base.

    An approximate gelu computes x^3, and its gradient 3 x^2. TensorFlow makes x x^2 of the first,
    and computes one square for both, with the name of the gradient's. Then it turns c (x x^2) into
    (c x) x^2 or (c x^2) x, after the names of x and x^2. So the square must have the gradient's
    name wherever x^3 is computed, also where the gradient takes another version of x.
    """
    found: dict[int, list[int]] = {}
    for index in range(step.begin, step.end):
        base = _base(step, index)
        if base is not None:
            later = (user for user in step.consumers[base] if user >= step.end)
            powers = [user for user in later if _base(step, user) == base]
            if powers:
                found[index] = powers
    return found


def _base(step: TracedStep, index: int) -> int | None:
    """Return the tensor of which an operation computes a power with a constant exponent."""
    op = step.ops[index]
    is_power = op.kind == "Pow" and op.inputs and op.inputs[1] in step.constant
    return op.inputs[0] if is_power else None
