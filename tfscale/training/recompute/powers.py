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
        if step.ops[index].kind == "Pow":
            base = step.ops[index].inputs[0]
            later = [user for user in step.consumers[base] if user >= step.end]
            powers = [user for user in later if _is_power(step, user, base)]
            if powers:
                found[index] = powers
    return found


def _is_power(step: TracedStep, index: int, base: int) -> bool:
    op = step.ops[index]
    return op.kind == "Pow" and op.inputs[0] == base and op.inputs[1] in step.constant
