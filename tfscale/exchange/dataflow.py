"""What a traced tensor is computed from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import tensorflow as tf

from tfscale.bridge.graphs import function_in

# Attributes of operations that name the functions which they run.
_CALLS = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("While", "StatelessWhile"), ("body",)),
}

# How many tensors ``is_made_of`` looks at: what it is asked of is simple, if it is true.
_SIMPLE = 100


def gathered(
    tensors: Iterable[tf.Tensor],
    own: Callable[[tf.Operation], int],
    found: dict[tf.Operation, int] | None = None,
) -> list[int]:
    """For each tensor, the bits that ``own`` gives to the operations that it depends on.

    A tensor that a function captures depends on what it is outside; a result of a branch, loop or
    function on all that goes in.

    Args:
        tensors: of the graph that is being traced.
        own: the bits of one operation.
        found: what earlier calls have found out, to be used and added to.

    Returns:
        One number for each tensor.
    """
    found = {} if found is None else found

    def bits(op: tf.Operation) -> int:
        waiting = [(op, False)]
        while waiting:
            one, entered = waiting.pop()
            if entered:
                for source in _sources(one):
                    found[one] |= found[source.op]
            elif one not in found:
                found[one] = own(one)
                waiting.append((one, True))
                waiting.extend((source.op, False) for source in _sources(one))
        return found[op]

    return [bits(tensor.op) for tensor in tensors]


def is_made_of(tensor: tf.Tensor, known: Collection[Any], variable: tf.Tensor) -> bool:
    """Whether a tensor is computed of constants, a variable and known tensors alone.

    Args:
        tensor: of the graph that is being traced.
        known: references to tensors.
        variable: its handle in that graph.
    """
    waiting, seen = [tensor], {tensor.ref()}
    while waiting:
        one = waiting.pop()
        op = one.op
        if one.ref() in known or op.type == "Const":
            continue
        if op.type == "ReadVariableOp" and op.inputs[0] is variable:
            continue
        if op.op_def.is_stateful or not op.inputs or len(seen) > _SIMPLE:
            return False
        waiting.extend(x for x in op.inputs if x.ref() not in seen)
        seen.update(x.ref() for x in op.inputs)
    return True


def called_graphs(op: tf.Operation) -> list[tf.Graph]:
    """Return the graphs of the functions, branches or loops that an operation runs."""
    names = [getattr(value, "name", None) for value in _attributes(op)]
    functions = [function_in(op.graph, name) for name in names if name]
    return [function.graph for function in functions if getattr(function, "graph", None)]


def _attributes(op: tf.Operation) -> list[Any]:
    return [op.get_attr(name) for name in _CALLS.get(op.type, ())]


def is_captured(placeholder: tf.Operation) -> bool:
    """Whether a function has it from outside, and not as an argument."""
    return any(inner is placeholder.outputs[0] for _, inner in _captures(placeholder))


def _sources(op: tf.Operation) -> list[tf.Tensor]:
    """The tensors that an operation takes; for one that stands for a captured tensor, that."""
    if op.type != "Placeholder":
        return list(op.inputs)
    outside = [outer for outer, inner in _captures(op) if inner is op.outputs[0]]
    return [outer for outer in outside if hasattr(outer, "op")]  # what is known already has none


def _captures(op: tf.Operation) -> list[tuple[Any, tf.Tensor]]:
    return list(getattr(op.graph, "captures", []))
