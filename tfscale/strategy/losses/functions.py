"""Numbers that a program computes from sums and means over the batch, such as a root of a mean.

A root of a replica's mean is not a part of the root of the batch's mean. But the batch's mean is a
sum of replicas' parts, so that all replicas can know it, and compute the root of it again.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import tensorflow as tf

from tfscale.bridge.graphs import another
from tfscale.exchange import dataflow
from tfscale.strategy.losses.divisors import (
    DIVIDES,
    constant,
    is_same_everywhere,
    reduces_the_batch,
    varies,
)
from tfscale.strategy.step import this_step
from tfscale.strategy.step_graph import StepGraph

_MOST = 100  # largest number of operations in a function
_OVER_AXES = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any")

# Caches of each step's graph: operations that hold a sum over samples, and a sum of such sums.
_Bits = dict[tf.Operation, int]
_known: weakref.WeakKeyDictionary[StepGraph, tuple[_Bits, _Bits]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Function:
    """A number, the numbers that it is computed from, and how.

    Attributes:
        result: the number.
        leaves: tensors that the number is computed from, apart from constants.
        operations: operations that compute it, each after those that give its inputs.
    """

    result: tf.Tensor
    leaves: list[tf.Tensor]
    operations: list[tf.Operation]

    def of(self, values: Mapping[Any, tf.Tensor]) -> tf.Tensor:
        """Return what the function gives for other values of its leaves, by their references."""
        found = dict(values)
        for op in self.operations:
            inputs = [found.get(x.ref(), x) for x in op.inputs]
            outputs = another(op, inputs, f"{op.name}/of_batch").outputs
            found |= {x.ref(): y for x, y in zip(op.outputs, outputs, strict=True)}
        return found[self.result.ref()]


def function_of(number: tf.Tensor, is_part: Callable[[tf.Tensor], bool]) -> Function | None:
    """Return how a number is computed from sums and means over the batch, and from weights.

    None is returned for numbers that are computed from anything else.

    Args:
        number: number in the graph of the step.
        is_part: function that says whether a tensor is a sum or a mean over the batch.
    """
    found = _computed_from(number, lambda x: not varies(x) or (x.dtype.is_floating and is_part(x)))
    varying = [] if found is None else [x for x in found.leaves if varies(x)]
    return found if varying and not any(map(_has_statistics_of_replica, varying)) else None


def function_of_results(number: tf.Tensor, results: Collection[Any]) -> Function | None:
    """Return how a number is computed from results of metrics; None if it is not.

    Args:
        number: number in the graph of the step.
        results: references to the results.
    """
    operations = {result.deref().op for result in results}
    bits: dict[tf.Operation, int] = {}

    def is_known(x: tf.Tensor) -> bool:
        (uses,) = dataflow.gathered([x], lambda op: op in operations, bits)
        return x.ref() in results or not (uses or varies(x))

    found = None if is_known(number) else _computed_from(number, is_known)
    return found if found is not None and all(x.ref() in results for x in found.leaves) else None


def _computed_from(number: tf.Tensor, is_known: Callable[[tf.Tensor], bool]) -> Function | None:
    """Return how a number is computed from known tensors, constants left out of its leaves."""
    step = this_step()
    if number.shape.rank != 0 or not step.graph.is_graph_of_batch(number.graph):
        return None
    if step.is_microbatch:  # later microbatches change the sums
        return None
    leaves: dict[Any, tf.Tensor] = {}
    operations: dict[tf.Operation, None] = {}
    waiting = [(number, False)]
    while waiting:
        x, is_entered = waiting.pop()
        if is_entered:
            operations[x.op] = None
        elif x.ref() not in leaves and x.op not in operations:
            if x is not number and is_known(x):
                if x.dtype.is_floating and constant(x) is None:
                    leaves[x.ref()] = x
            elif not _can_be_copied(x.op) or len(operations) + len(waiting) > _MOST:
                return None
            else:
                waiting += [(x, True), *((y, False) for y in x.op.inputs)]
    return Function(number, list(leaves.values()), list(operations))


def _can_be_copied(op: tf.Operation) -> bool:
    has_effects = op.op_def.is_stateful or dataflow.called_graphs(op)
    # A gradient of the user's own computes with the tensors of the first copy.
    is_own = has_effects or "_gradient_op_type" in op.node_def.attr
    return bool(op.inputs) and not is_own and not this_step().graph.gives_batch(op)


def may_hold_sums(x: tf.Tensor) -> bool:
    """Return whether what looks like a sum over samples may be something else.

    Such is a gradient: replicas have summed it, or it is divided by the replica's number of rows.
    """

    def divides(op: tf.Operation) -> bool:
        if op.type not in DIVIDES or op.inputs[1].shape.num_elements() != 1:
            return False
        return varies(op.inputs[1]) and not is_same_everywhere(op.inputs[1])

    if not this_step().graph.has_samples(x):
        return True
    return any(divides(one.op) for one, _ in dataflow.behind([x], ()))


def _has_statistics_of_replica(x: tf.Tensor) -> bool:
    """Return whether a sum over samples is of numbers that hold another sum over samples.

    Such a number, as a deviation from the batch's mean, is of the replica's samples alone, unless
    replicas have summed it.
    """
    once, twice = _known.setdefault(this_step().graph, ({}, {}))

    def hides(op: tf.Operation, _: tf.Tensor) -> int:
        return int(dataflow.is_collective(op))

    def again(op: tf.Operation) -> int:
        below = op.inputs[:1] if _reduces(op) else []
        return int(any(dataflow.gathered(below, lambda op: int(_reduces(op)), once, hides)))

    return bool(dataflow.gathered([x], again, twice, hides)[0])


def _reduces(op: tf.Operation) -> bool:
    return op.type in _OVER_AXES and reduces_the_batch(op.outputs[0])
