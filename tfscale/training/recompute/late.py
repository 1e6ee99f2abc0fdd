"""Results that TensorFlow computes later than their place in the graph."""

from __future__ import annotations

from tfscale.training.recompute.traced_step import TracedStep

FILTER, BIAS = "Conv2DBackpropFilter", "BiasAddGrad"


def positions(step: TracedStep) -> list[int]:
    """Return for each operation the place in the graph before which it has not finished.

    oneDNN computes the gradients of a filter and of its bias in one operation, if both use the same
    incoming gradient. The bias's gradient alone would finish sooner. Together they wait for all
    inputs of the filter's gradient, and so does every user of the bias's gradient.
    """
    result = list(range(len(step.ops)))
    for index in range(step.end, len(step.ops)):
        op = step.ops[index]
        makers = [step.producer[tensor] for tensor in op.inputs]
        waits = [result[maker] for maker in makers if maker >= step.end]
        if op.kind == BIAS and makers:  # a gradient that nobody wants has no inputs
            waits += _filters(step, makers[0])
        result[index] = max([index, *waits])
    return result


def _filters(step: TracedStep, maker: int) -> list[int]:
    """Return the operations that compute gradients of filters from an operation's results."""
    users = {user for tensor in step.ops[maker].outputs for user in step.consumers[tensor]}
    return [user for user in users if step.ops[user].kind == FILTER]
