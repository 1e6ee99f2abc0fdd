"""What TensorFlow computes later than a step asks for it."""

from __future__ import annotations

from tfscale.recompute.step import Step

FILTER, BIAS = "Conv2DBackpropFilter", "BiasAddGrad"


def positions(step: Step) -> list[int]:
    """Of each operation: no earlier than which one it is done.

    oneDNN makes one operation of the gradients of a filter and of its bias, if both are made of
    the same gradient. The bias's alone would be done sooner; together they wait for what the
    filter's waits for, and all that needs the bias's waits with them.
    """
    result = list(range(len(step.ops)))
    for index in range(step.end, len(step.ops)):
        op = step.ops[index]
        makers = [step.producer[tensor] for tensor in op.inputs]
        waits = [result[maker] for maker in makers if maker >= step.end]
        if op.kind == BIAS:
            waits += _filters(step, makers[0])
        result[index] = max([index, *waits])
    return result


def _filters(step: Step, maker: int) -> list[int]:
    """The gradients of filters that are made of what an operation gives."""
    users = {user for tensor in step.ops[maker].outputs for user in step.consumers[tensor]}
    return [user for user in users if step.ops[user].kind == FILTER]
