"""Makes a traced training step compute segments again, instead of keeping their results.

The backward pass is there already: operations that take tensors of the forward pass. Those
of a segment are copied, and the backward pass takes the copies' results. So it uses the
very same operations with the very same inputs: random numbers come from the seeds that the
forward pass has drawn, and what changes a variable is never copied. The originals' results
are freed as soon as the forward pass has used them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.recompute.step import SHAPES, Again, Step

# Which input of an operation is the shape of its result.
_SHAPE_INPUT = {"Reshape": 1, "BroadcastTo": 1, "Fill": 0, "Conv2DBackpropInput": 0}


def rewrite(
    graph: tf.Graph, operations: Sequence[tf.Operation], step: Step, again: Sequence[Again]
) -> None:
    """Rewrites the graph.

    Args:
        graph: of one step, whose gradients have just been made.
        operations: its operations.
        step: the same, as ``read`` gives it.
        again: what each segment computes again.
    """
    latest_first = sorted(again, key=lambda one: one.before)
    done: list[int] = []  # operations behind which the segment before is no longer needed
    for one in latest_first:
        gate = sorted({*_gradients_before(step, one), *(i for i in done if i < one.before)})
        _Copies(graph, operations, step, one, gate).make()
        done = _users(step, one)
    for number in {t for one in again for t in one.tensors}:
        _part_from_its_only_user(graph, operations, step, number)


def _users(step: Step, one: Again) -> list[int]:
    """Operations of the backward pass that take what a segment computes again."""
    later = (index for tensor in one.tensors for index in step.consumers[tensor])
    return sorted({index for index in later if index >= step.end})


def _gradients_before(step: Step, one: Again) -> set[int]:
    """What has made the gradients that are there when the segment's turn comes."""
    return {
        step.producer[tensor]
        for index in range(one.before, len(step.ops))
        for tensor in step.ops[index].inputs
        if step.end <= step.producer[tensor] < one.before
    }


class _Copies:
    def __init__(
        self,
        graph: tf.Graph,
        operations: Sequence[tf.Operation],
        step: Step,
        again: Again,
        gate: Sequence[int],
    ) -> None:
        self._graph = graph
        self._operations = operations
        self._step = step
        self._again = again
        self._gate = gate
        self._copied = frozenset(again.ops)
        self._copies: dict[int, Any] = {}  # tensors, by number
        self._late: dict[int, Any] = {}  # tensors from outside, not before the gate

    def make(self) -> None:
        with self._graph.as_default(), tf.control_dependencies(None), tf.name_scope(""):
            with tf.control_dependencies([self._operations[index] for index in self._gate]):
                self._open = tf.no_op("again/gate")
            for index in self._again.ops:
                self._copy(index)
        for index in _users(self._step, self._again):
            self._redirect(index)

    def _copy(self, index: int) -> None:
        original = self._operations[index]
        inputs = [
            self._copies[number] if number in self._copies else self._wait(number, tensor)
            for number, tensor in zip(self._step.ops[index].inputs, original.inputs, strict=True)
        ]
        self._keep_shape(original, inputs)
        node = original.node_def
        attributes = {name: value for name, value in node.attr.items() if name != "_class"}
        with tf.device(original.device or None):
            copy = self._graph.create_op(
                original.type,
                inputs,
                [tensor.dtype for tensor in original.outputs],
                name=_name(original),
                attrs=attributes,
            )
        for number, mine, its in zip(
            self._step.ops[index].outputs, copy.outputs, original.outputs, strict=True
        ):
            mine.set_shape(its.shape)
            if number in self._again.tensors:
                self._copies[number] = self._not_fused(number, mine)

    def _keep_shape(self, original: tf.Operation, inputs: list[Any]) -> None:
        """A copy's shape is that of the original, and not just another unknown one.

        Whether two shapes are known to be the same decides how TensorFlow reorders sums and
        products, and so how they are rounded.
        """
        position = _SHAPE_INPUT.get(original.type)
        result = original.outputs[0]
        if position is not None and not result.shape.is_fully_defined():
            with tf.device(original.device or None):
                inputs[position] = tf.shape(result, inputs[position].dtype, _name(original))

    def _wait(self, number: int, tensor: Any) -> Any:
        """The tensor, but not before the gate is open; unless it may be a shape or an axis.

        TensorFlow reasons about shapes, and would see less through the gate.
        """
        small = tensor.shape.rank is not None and tensor.shape.rank < 2
        if tensor.op.type == "Const" or tensor.dtype == tf.resource:
            return tensor
        if small and tensor.dtype in (tf.int32, tf.int64):
            return tensor
        if number not in self._late:
            with tf.device(tensor.op.device or None), tf.control_dependencies([self._open]):
                self._late[number] = _behind(tensor)
        return self._late[number]

    def _not_fused(self, number: int, copy: Any) -> Any:
        """A copy that TensorFlow fuses with its only user, if it does so with the original.

        Fused operations may round differently.
        """
        users = self._step.consumers[number]
        mine = [index for index in users if index >= self._step.end or index in self._copied]
        return _behind(copy) if len(mine) == 1 < self._step.users[number] else copy

    def _redirect(self, index: int) -> None:
        operation = self._operations[index]
        if operation.type in SHAPES:
            return
        for position, number in enumerate(self._step.ops[index].inputs):
            if number in self._copies:
                operation._update_input(position, self._copies[number])


def _part_from_its_only_user(
    graph: tf.Graph, operations: Sequence[tf.Operation], step: Step, number: int
) -> None:
    """Parts a tensor that had other users from the only one that is left: see `_not_fused`."""
    producer = step.producer[number]
    tensor = operations[producer].outputs[step.ops[producer].outputs.index(number)]
    users = tensor.consumers()
    if len(users) != 1 or step.users[number] == 1:
        return
    device = tf.device(tensor.op.device or None)
    with graph.as_default(), tf.control_dependencies(None), device, tf.name_scope(""):
        parted = _behind(tensor)
    for position, taken in enumerate(users[0].inputs):
        if taken is tensor:
            users[0]._update_input(position, parted)


def _behind(tensor: Any) -> Any:
    """The same tensor behind an operation that costs nothing.

    TensorFlow would remove an Identity, and then see through.
    """
    if tensor.dtype == tf.variant:
        return tf.identity(tensor, _name(tensor.op))
    return tf.raw_ops.EnsureShape(input=tensor, shape=tensor.shape, name=_name(tensor.op))


def _name(original: tf.Operation) -> str:
    """TensorFlow orders terms of sums and products by name: this sorts like the original."""
    return f"{original.name}/again"
