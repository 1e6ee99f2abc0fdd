"""What a traced tensor is computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf


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
