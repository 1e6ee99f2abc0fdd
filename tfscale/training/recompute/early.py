"""Results that TensorFlow computes earlier than their place in the graph."""

from __future__ import annotations

from dataclasses import replace

from tfscale.training.recompute.traced_step import Tensor, TracedStep


def with_early_products(step: TracedStep) -> TracedStep:
    """Return the step as TensorFlow runs it: c (x y), with a constant c, becomes x (c y).

    If y is a result of the forward pass and x one of the backward pass, TensorFlow computes c y
    early and keeps it. It keeps c y in addition to y if the backward pass needs y elsewhere (a
    softmax behind a scale), and otherwise instead of y.
    """
    ops, tensors = list(step.ops), list(step.tensors)
    for outer in range(step.end, len(step.ops)):
        found = _inner_product(step, outer)
        if found is not None:
            inner, right = found
            early = len(tensors)
            tensors.append(Tensor(step.tensors[step.tensors[right].home].size, early))
            maker = step.producer[right]
            ops[maker] = replace(ops[maker], outputs=(*ops[maker].outputs, early))
            ops[inner] = replace(ops[inner], inputs=(*ops[inner].inputs, early))
    return replace(step, ops=ops, tensors=tensors)


def _inner_product(step: TracedStep, outer: int) -> tuple[int, int] | None:
    """Return the inner product x y of a product with a constant, and its factor y."""
    if step.ops[outer].kind != "Mul":
        return None
    factors = [tensor for tensor in step.ops[outer].inputs if tensor not in step.constant]
    if len(factors) != 1 or len(step.consumers[factors[0]]) != 1:
        return None
    inner = step.producer[factors[0]]
    if inner < step.end or step.ops[inner].kind != "Mul":
        return None
    left, right = step.ops[inner].inputs
    if {left, right} & step.constant or step.producer[right] not in step.unit_of:
        return None
    others = [user for user in step.consumers[right] if user >= step.end and user != inner]
    return (inner, right) if others else None
