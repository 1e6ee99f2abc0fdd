"""Rewriting of a traced training step, which then computes segments again.

The backward pass already exists: its operations take tensors of the forward pass. The rewriting
copies the operations of a segment, and the backward pass takes the copies' results. So it uses the
same operations with the same inputs: random numbers come from the seeds that the forward pass has
drawn, and operations that change a variable are never copied. The originals' results are freed as
soon as the forward pass has used them.

Then TensorFlow optimizes the graph: it fuses operations and reorders sums and products, which
changes the rounding. This module makes sure that TensorFlow treats originals, copies and backward
pass as it would treat the original graph. Originals and copies have one user if the original had
one before, and several if it had several. Shapes that were known to be equal still are. Terms sort
by name as before. This module puts no operation between others that might be fused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import tensorflow as tf

from tfscale.bridge.graphs import another, replace_input, shaped_like
from tfscale.training.recompute.gate import behind, make_gate, use
from tfscale.training.recompute.late import positions
from tfscale.training.recompute.lengths import new_lengths
from tfscale.training.recompute.powers import merged_powers
from tfscale.training.recompute.traced_step import (
    ORIGINAL,
    SHAPES,
    Again,
    TracedStep,
    Versions,
    runs_functions,
)

# The input of an operation that is the shape of its result.
_SHAPE_INPUT = {"Reshape": 1, "BroadcastTo": 1, "Fill": 0, "Conv2DBackpropInput": 0}


def rewrite(
    graph: tf.Graph, operations: Sequence[tf.Operation], step: TracedStep, again: Sequence[Again]
) -> None:
    """Rewrite the graph of a step.

    Args:
        graph: the graph of one step, whose gradients have just been made.
        operations: the graph's operations.
        step: the step, as ``read`` returns it.
        again: the operations that are computed again together, sorted by ``before``.
    """
    done = positions(step)
    versions = Versions(again)
    same = _Same(new_lengths(step, operations), merged_powers(step))
    made: list[_Copies] = []
    for number, one in enumerate(again):
        gate = make_gate(graph, operations, step, done, one.before)
        users = _Users(step, again, versions, number)
        made.append(_Copies(graph, operations, step, users, gate, same))
        made[-1].make(made)
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(""):
        originals = _Users(step, again, versions, ORIGINAL)
        for tensor in versions.tensors:
            if originals.lack(tensor):
                producer = step.producer[tensor]
                use(operations[producer].outputs[step.ops[producer].outputs.index(tensor)])
        for index, equal in same.powers.items():
            if step.ops[index].inputs[0] in versions.tensors:
                _raise_again(operations, equal, operations[index].inputs[0])


class _Same(NamedTuple):
    """Facts that TensorFlow must know of copies as it knows them of their originals.

    Args:
        shapes: tensors whose copies get the original's shape.
        powers: operations of the forward pass, with the powers that TensorFlow merges with them.
    """

    shapes: frozenset[int]
    powers: Mapping[int, Sequence[int]]


class _Users:
    """The users of one version of tensors: of the originals, or of what is computed again once."""

    def __init__(
        self, step: TracedStep, again: Sequence[Again], versions: Versions, number: int
    ) -> None:
        self._step = step
        self._again = again
        self.versions = versions
        self.number = number

    @property
    def again(self) -> Again:
        """The operations that make this version, if it is not the original one."""
        return self._again[self.number]

    def backward(self, tensor: int) -> list[int]:
        """Return the operations of the backward pass that use this version of a tensor."""
        later = (index for index in self._step.consumers[tensor] if index >= self._step.end)
        return [i for i in later if self.versions.for_op(i, tensor) == self.number]

    def count(self, tensor: int) -> int:
        """Return how many users this version of a tensor has."""
        if self.number == ORIGINAL:
            own = [index for index in self._step.consumers[tensor] if index < self._step.end]
        else:
            own = [index for index in self._step.consumers[tensor] if index in self._copied]
        return len(own) + len(self.backward(tensor)) + len(self._later(tensor))

    def lack(self, tensor: int) -> bool:
        """Return whether this version has at most one user, and fewer than without copies.

        A result without users is never computed. But a function computes all its results, and may
        use them itself.
        """
        count, maker = self.count(tensor), self._step.ops[self._step.producer[tensor]]
        fewest = 0 if runs_functions(maker.kind) else 1
        return fewest <= count <= 1 and count < len(self._step.consumers[tensor])

    @cached_property
    def _copied(self) -> frozenset[int]:
        return frozenset(self.again.ops)

    def _later(self, tensor: int) -> list[int]:
        """Return what is computed again from this version; each takes it through one operation."""
        users = self._step.consumers[tensor]
        return [
            number
            for number in range(self.number + 1, len(self._again))
            if self.versions.for_copy(number, tensor) == self.number
            and any(index in self._ops_of[number] for index in users)
        ]

    @cached_property
    def _ops_of(self) -> list[frozenset[int]]:
        return [frozenset(one.ops) for one in self._again]


class _Copies:
    def __init__(
        self,
        graph: tf.Graph,
        operations: Sequence[tf.Operation],
        step: TracedStep,
        users: _Users,
        gate: tf.Operation,
        same: _Same,
    ) -> None:
        self._graph = graph
        self._operations = operations
        self._step = step
        self._users = users
        self._again = users.again
        self._gate = gate
        self._same = same
        self._copies: dict[int, Any] = {}  # tensors, by number
        self._late: dict[int, Any] = {}  # tensors from outside, delayed by the gate

    def make(self, all_copies: Sequence[_Copies]) -> None:
        """Make the copies and let the backward pass use them.

        Args:
            all_copies: these copies and those that were made before.
        """
        with self._graph.as_default(), tf.control_dependencies(None), tf.name_scope(""):
            for index in self._again.ops:
                self._copy(index, all_copies)
            self._use_like_originals()
            users = (self._users.backward(tensor) for tensor in self._again.tensors)
            for index in sorted({index for each in users for index in each}):
                self._redirect(index)

    def _copy(self, index: int, all_copies: Sequence[_Copies]) -> None:
        original = self._operations[index]
        with tf.device(original.device or None):
            inputs = self._inputs(index, all_copies)
        made = _another(original, inputs)
        if index in self._same.powers:
            _raise_again(self._operations, self._same.powers[index], inputs[0])
        for number, mine, its in zip(
            self._step.ops[index].outputs, made.outputs, original.outputs, strict=True
        ):
            mine.set_shape(its.shape)
            if number in self._again.tensors:
                self._copies[number] = (
                    shaped_like(mine, its, _name(original)) if number in self._same.shapes else mine
                )

    def _inputs(self, index: int, all_copies: Sequence[_Copies]) -> list[Any]:
        original = self._operations[index]
        inputs = []
        for number, tensor in zip(self._step.ops[index].inputs, original.inputs, strict=True):
            version = self._users.versions.for_copy(self._users.number, number)
            if version == self._users.number:
                inputs.append(self._copies[number])
            elif version == ORIGINAL:
                inputs.append(self._wait(number, tensor))
            else:
                inputs.append(self._wait(number, all_copies[version]._copies[number]))
        self._keep_shape(original, inputs)
        return inputs

    def _keep_shape(self, original: tf.Operation, inputs: list[Any]) -> None:
        """Give a copy the original's shape, instead of another unknown shape."""
        position = _SHAPE_INPUT.get(original.type)
        result = original.outputs[0]
        if position is not None and not result.shape.is_fully_defined():
            inputs[position] = tf.shape(result, inputs[position].dtype, _name(original))

    def _wait(self, number: int, tensor: Any) -> Any:
        """Delay a tensor by the gate, unless it may be a constant, a shape or an axis.

        TensorFlow reasons about these, and would see less through the gate.
        """
        small = tensor.shape.rank is not None and tensor.shape.rank < 2
        if tensor.dtype == tf.resource or number in self._step.constant:
            return tensor
        if small and tensor.dtype in (tf.int32, tf.int64):
            return tensor
        if number not in self._late:
            with tf.control_dependencies([self._gate]):
                self._late[number] = behind(tensor)
        return self._late[number]

    def _use_like_originals(self) -> None:
        """Give copies with one user a second user, if the originals have several."""
        shapes: list[int] = []
        for number, copy in self._copies.items():
            if self._users.lack(number):
                use(copy)
            elif self._users.count(number) == 1 and not copy.shape.is_fully_defined():
                shapes += self._step.shapes[number]
        self._take_shapes(list(dict.fromkeys(shapes)))

    def _take_shapes(self, shapes: list[int]) -> None:
        """Take shapes of copies, where shapes of originals are taken.

        Many shapes only say over which axes a gradient is summed. TensorFlow removes these when it
        knows the axes, but first counts them as users.
        """
        taken: dict[int, Any] = {}
        summed: set[int] = set()
        for index in shapes:
            made = _another(self._operations[index], self._with_copies(index, self._copies))
            for number, shape in zip(self._step.ops[index].outputs, made.outputs, strict=True):
                taken[number] = shape
                users = self._step.consumers[number]
                axes = [i for i in users if self._step.ops[i].kind == "BroadcastGradientArgs"]
                summed.update(axes)
                if users and not axes:
                    use(shape)
        for index in sorted(summed):
            made = _another(self._operations[index], self._with_copies(index, taken))
            for axes_of_one in made.outputs:
                use(axes_of_one)

    def _with_copies(self, index: int, copies: dict[int, Any]) -> list[Any]:
        numbers, tensors = self._step.ops[index].inputs, self._operations[index].inputs
        return [copies.get(number, its) for number, its in zip(numbers, tensors, strict=True)]

    def _redirect(self, index: int) -> None:
        operation = self._operations[index]
        if operation.type in SHAPES:
            return
        for position, number in enumerate(self._step.ops[index].inputs):
            if self._users.versions.for_op(index, number) == self._users.number:
                replace_input(operation, position, self._copies[number])


def _raise_again(operations: Sequence[tf.Operation], powers: Sequence[int], base: Any) -> None:
    """Compute powers of the backward pass of this base, too, if TensorFlow merges them."""
    for index in powers:
        _, exponent = operations[index].inputs
        use(_another(operations[index], [base, exponent]).outputs[0])


def _another(original: tf.Operation, inputs: Sequence[Any]) -> tf.Operation:
    return another(original, inputs, _name(original))


def _name(original: tf.Operation) -> str:
    """Return a name that sorts like the original's: TensorFlow orders terms of sums by name."""
    return f"{original.name}/again"
