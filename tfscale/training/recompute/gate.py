"""Operations that decide when a segment is computed again, and that TensorFlow does not remove."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.graphs import after, behind as passed
from tfscale.training.recompute.traced_step import TracedStep

# TensorFlow rewrites these operations, unless other operations wait for them.
_ARITHMETIC = frozenset(
    {
        "Add",
        "AddN",
        "AddV2",
        "BroadcastTo",
        "Cast",
        "Div",
        "Exp",
        "Identity",
        "Mul",
        "Neg",
        "Pow",
        "RealDiv",
        "Reshape",
        "Rsqrt",
        "Select",
        "SelectV2",
        "Sqrt",
        "Square",
        "SquaredDifference",
        "Sub",
        "Sum",
        "Transpose",
    }
)


def make_gate(
    graph: tf.Graph,
    operations: Sequence[tf.Operation],
    step: TracedStep,
    done: Sequence[int],
    before: int,
) -> tf.Operation:
    """Return an operation that runs when the backward pass reaches a segment.

    The gate waits for the inputs of arithmetic operations, not for these operations: TensorFlow
    does not rewrite operations that others wait for, and so would round differently. The gate must
    not wait for operations that depend on the gate.

    Args:
        graph: the graph of the step.
        operations: the graph's operations.
        step: the step, as ``read`` returns it.
        done: the result of ``late.positions``.
        before: the first operation that needs the segment.
    """
    keys: list[tf.Operation] = []
    waiting, seen = sorted(_ends_before(step, before)), set[int]()
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(""):
        while waiting:
            index = waiting.pop()
            if index in seen or index < step.end:
                continue
            seen.add(index)
            op = step.ops[index]
            users = {user for tensor in op.outputs for user in step.consumers[tensor]}
            if done[index] >= before:
                waiting += [step.producer[tensor] for tensor in op.inputs]
            elif op.kind not in _ARITHMETIC:
                keys.append(operations[index])
            elif len(users) > 1:
                keys.append(behind(operations[index].outputs[0]).op)
            else:
                waiting += [step.producer[tensor] for tensor in op.inputs]
        return after(keys, "again/gate")


def _ends_before(step: TracedStep, before: int) -> set[int]:
    """Return the operations that run last before the backward pass reaches ``before``.

    These include the gradients of variables: no other operation waits for them, so TensorFlow would
    delay them, and keep their inputs until then.
    """
    later = (tensor for op in step.ops[before:] for tensor in op.inputs)
    made = {step.producer[tensor] for tensor in (*later, *step.gradients)}
    return {index for index in made if step.end <= index < before}


def behind(tensor: Any) -> Any:
    """Pass a tensor through an operation that costs nothing and that no optimization removes."""
    return passed(tensor, f"{tensor.op.name}/again")


def use(tensor: Any) -> None:
    """Consume a tensor as soon as it exists, without any effect."""
    tensor.graph.control_outputs.append(behind(tensor).op)
