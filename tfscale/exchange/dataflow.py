"""Analysis of a traced graph: what a tensor is computed from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.graphs import function_in

# Attributes that name the functions which an operation runs, by the operation's type.
_CALLS = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("While", "StatelessWhile"), ("body",)),
}

# Number of tensors after which ``is_made_of`` gives up and returns False. The tensors for which
# its answer is True are simple.
_SIMPLE = 100


def gathered(
    tensors: Iterable[tf.Tensor],
    own: Callable[[tf.Operation], int],
    found: dict[tf.Operation, int] | None = None,
    hides: Callable[[tf.Operation, tf.Tensor], int] = lambda op, source: 0,
) -> list[int]:
    """Return for each tensor the bits that ``own`` gives to the operations it depends on.

    A tensor that a function captures depends on the captured tensor outside. A result of a branch,
    loop or function depends on all inputs of that branch, loop or function.

    Args:
        tensors: tensors of the graph that is being traced.
        own: function that returns the bits of one operation.
        found: results of earlier calls, which this call reads and extends.
        hides: function that returns the bits that an operation does not take over from an input.

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
                    found[one] |= found[source.op] & ~hides(one, source)
            elif one not in found:
                found[one] = own(one)
                waiting.append((one, True))
                waiting.extend((source.op, False) for source in _sources(one))
        return found[op]

    return [bits(tensor.op) for tensor in tensors]


def is_made_of(tensor: tf.Tensor, known: Collection[Any], variable: tf.Tensor) -> bool:
    """Return whether a tensor is computed from constants, a variable and known tensors alone.

    Args:
        tensor: tensor of the graph that is being traced.
        known: references to the known tensors.
        variable: handle of the variable in that graph.
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


def leaves(tensors: Iterable[tf.Tensor], known: Collection[Any]) -> list[tf.Tensor]:
    """Return known tensors behind some tensors, and all others that inputs do not explain.

    An operation with a state, such as a generator of random numbers, may give anything.

    Args:
        tensors: tensors of the graph that is being traced.
        known: references to tensors whose own inputs do not matter.
    """
    found = []
    for one, sources in behind(tensors, known):
        if one.dtype == tf.resource:
            continue
        if one.op.op_def.is_stateful or all(x.dtype == tf.resource for x in sources):
            found.append(one)
    return found


def handles(tensors: Iterable[tf.Tensor], known: Collection[Any]) -> list[Any]:
    """Return the handles of all variables that traced tensors depend on.

    Args:
        tensors: tensors of the graph that is being traced.
        known: references to tensors whose own inputs do not matter.
    """
    found = []
    for one, _ in behind(tensors, known):
        if one.dtype == tf.resource and one.op.type == "Placeholder":
            found += [outer for outer, inner in _captures(one.op) if inner is one]
    return [one for one in found if not hasattr(one, "op")]


def reading(tensors: Sequence[tf.Tensor], handles: Collection[int]) -> list[bool]:
    """Return which traced tensors depend on variables, of which the ids of handles are given."""

    def own(op: tf.Operation) -> int:
        if op.type != "Placeholder":
            return 0
        return int(any(id(x) in handles and y is op.outputs[0] for x, y in _captures(op)))

    return [bool(found) for found in gathered(tensors, own)]


def is_collective(op: tf.Operation) -> bool:
    """Return whether an operation computes with numbers of several replicas."""
    return bool(op.type.startswith(("Tfscale", "Collective")))


def is_random(op: tf.Operation) -> bool:
    """Return whether an operation draws random numbers."""
    return any(name in op.type for name in ("Random", "TruncatedNormal", "Multinomial"))


def behind(
    tensors: Iterable[tf.Tensor], known: Collection[Any]
) -> Iterator[tuple[tf.Tensor, list[tf.Tensor]]]:
    """Yield tensors and all that they are computed from, each once, with its own sources.

    Known tensors have none.
    """
    waiting, seen = list(tensors), set()
    while waiting:
        one = waiting.pop()
        if one.ref() not in seen:
            seen.add(one.ref())
            sources = [] if one.ref() in known else _sources(one.op)
            yield one, sources
            waiting.extend(sources)


def called_graphs(op: tf.Operation) -> list[tf.Graph]:
    """Return the graphs of the functions, branches or loops that an operation runs."""
    called = [op.get_attr(name) for name in _CALLS.get(op.type, ())]
    names = [getattr(value, "name", None) for value in called]
    functions = [function_in(op.graph, name) for name in names if name]
    return [function.graph for function in functions if getattr(function, "graph", None)]


def is_captured(placeholder: tf.Operation) -> bool:
    """Return whether a placeholder stands for a captured tensor, and not for an argument."""
    return any(inner is placeholder.outputs[0] for _, inner in _captures(placeholder))


def _sources(op: tf.Operation) -> list[tf.Tensor]:
    """Return an operation's inputs; for a placeholder, the captured tensor that it stands for."""
    if op.type != "Placeholder":
        return list(op.inputs)
    outside = [outer for outer, inner in _captures(op) if inner is op.outputs[0]]
    return [outer for outer in outside if hasattr(outer, "op")]  # eager tensors have none


def _captures(op: tf.Operation) -> list[tuple[Any, tf.Tensor]]:
    return list(getattr(op.graph, "captures", []))
