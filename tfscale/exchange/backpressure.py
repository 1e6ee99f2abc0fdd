"""A backward pass that waits for what it has sent, so that few gradients are in memory at once.

Where computing is faster than sending, a backward pass would soon have computed all gradients. The
link is as busy if the pass computes the gradients of one bucket while two others are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.graphs import next_number, number_of, wait_for
from tfscale.exchange.rows import numbers_of

_IN_FLIGHT = 2  # buckets


class Backpressure:
    """Waiting of a traced backward pass for the sums of its buckets.

    The operations that compute a bucket's gradients, and those beside them that go on to the layer
    before, wait for the sum of the second last bucket. They do so only if they were all traced
    after the operations of that bucket's gradients: then none can wait for itself.
    """

    def __init__(self) -> None:
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        # The first number after those of the backward pass.
        self._end = 0 if self._graph is None else next_number(self._graph)
        # The largest number of the operations of each bucket's gradients, and the bucket's result.
        self._sent: list[tuple[int, tf.Tensor]] = []

    def sent(self, gradients: Sequence[Any], results: Sequence[Any]) -> None:
        """Make the backward pass wait before it computes these gradients.

        Args:
            gradients: gradients of the next bucket, in the order in which they become complete.
            results: sums of the gradients, or parts of the sums.
        """
        if self._graph is None:
            return
        made = [numbers_of(each).op for each in gradients]
        if any(op.graph is not self._graph or number_of(op) >= self._end for op in made):
            return
        if len(self._sent) >= _IN_FLIGHT:
            last, result = self._sent[-_IN_FLIGHT]
            waiting = list(self._beside(made, last))
            if all(number_of(op) > last for op in made) and not _needs(result.op, waiting, last):
                for op in waiting:
                    wait_for(op, result.op)
        self._sent.append((max(map(number_of, made)), numbers_of(results[-1])))

    def _beside(self, made: Sequence[tf.Operation], last: int) -> Iterator[tf.Operation]:
        """Yield operations, and those of the backward pass that take what they take."""
        found = dict.fromkeys(made)
        found |= dict.fromkeys(op for each in made for x in each.inputs for op in x.consumers())
        return (op for op in found if last < number_of(op) < self._end)


def _needs(operation: tf.Operation, others: Sequence[tf.Operation], last: int) -> bool:
    """Return whether an operation depends on one of some others, whose numbers exceed ``last``."""
    waited, todo, seen = set(others), [operation], set()
    while todo:
        op = todo.pop()
        if op in waited:
            return True
        if op in seen or number_of(op) <= last:
            continue
        seen.add(op)
        todo += [x.op for x in op.inputs] + list(op.control_inputs)
    return False
