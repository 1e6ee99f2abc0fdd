"""Results that TensorFlow computes later than they stand in the graph."""

from __future__ import annotations

from tfscale.recompute.traced_step import TracedStep

FILTER, BIAS = "Conv2DBackpropFilter", "BiasAddGrad"


def positions(step: TracedStep) -> list[int]:
    """For each operation the place in the graph before which it is not done.

    oneDNN computes the gradients of a filter and of its bias in one operation, if both are
    computed from the same gradient. The bias's gradient alone would be done sooner; together they
    wait for all inputs of the filter's gradient, and so does whatever needs the bias's gradient.
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


def _filters(step: TracedStep, maker: int) -> list[int]:
    """Operations that compute gradients of filters from the results of an operation."""
    users = {user for tensor in step.ops[maker].outputs for user in step.consumers[tensor]}
    return [user for user in users if step.ops[user].kind == FILTER]
