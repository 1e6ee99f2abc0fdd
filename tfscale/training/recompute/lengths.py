"""Results whose lengths TensorFlow takes for new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.training.recompute.traced_step import TracedStep


def new_lengths(step: TracedStep, operations: Sequence[tf.Operation]) -> frozenset[int]:
    """Return the results of the forward pass whose copies must be given the original's shape.

    If an operation has two inputs of unknown length, TensorFlow gives its result a new unknown
    length: one to the original, and another one to each copy. But it rewrites sums only if it knows
    that shapes are equal. A result with one user passes the new length on, and TensorFlow may fuse
    it with its user, so nothing may come in between. It fuses nothing with a result that several
    operations use: there the copy gets the shape.
    """
    passed: set[int] = set()
    found: set[int] = set()
    for index in range(step.begin, step.end):
        op, operation = step.ops[index], operations[index]
        unknown = sum(not _is_known(tensor) for tensor in operation.inputs)
        if unknown < 2 and passed.isdisjoint(op.inputs):
            continue
        for number, tensor in zip(op.outputs, operation.outputs):
            if not _is_known(tensor):
                several = len(step.consumers[number]) > 1
                (found if several else passed).add(number)
    return frozenset(found)


def _is_known(tensor: Any) -> bool:
    return tensor.dtype in (tf.resource, tf.variant) or bool(tensor.shape.is_fully_defined())
