"""Whole weights of a step, of which each replica holds a part: gathered shortly before each use.

TensorFlow runs an operation as soon as it can. So all weights would be gathered when a step begins,
and would stay until the backward pass has used them. Three rules keep few of them in memory:

- A gather begins when the layer before begins: one layer is gathered while another one computes.
- The backward pass takes weights that are gathered again, in its own order.
- Such a gather also waits until the gradient of the weight but one before has been sent.

Both gathers of a weight take one tensor, which the step has read once: it stays as it is even if an
optimizer updates the weight meanwhile. An operation waits only for operations that were traced
before the first user of its result, so no operation can wait for itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfscale.bridge.graphs import another, behind, number_of, replace_input
from tfscale.exchange.rows import numbers_of

# Operations that show the numbers of their first input in another shape or precision.
_VIEWS = ("Cast", "ExpandDims", "Identity", "IdentityN", "Reshape", "Squeeze", "Transpose")

# Operations that need no numbers.
_SHAPES = ("Rank", "Shape", "ShapeN", "Size")

# Makes the whole weight from the replica's part of it.
Gather = Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass
class _Read:
    """A weight that a layer has read.

    Attributes:
        weight: the weight.
        part: the replica's part of it.
        whole: the whole weight.
        again: gathers the weight again.
        gradients: gradients of the part, which a backward pass adds.
    """

    weight: Any
    part: tf.Tensor
    whole: tf.Tensor
    again: Gather
    gradients: list[tf.Tensor]

    def views(self) -> Iterator[tf.Tensor]:
        """Yield the whole weight, and what has the same numbers in another shape or precision."""
        todo = [self.whole]
        while todo:
            tensor = todo.pop()
            yield tensor
            for op in tensor.consumers():
                if op.type in _VIEWS and op.inputs[0] is tensor:
                    todo += op.outputs


def _noted(part: tf.Tensor, gradients: list[tf.Tensor]) -> Any:
    """Return a part of a weight; its gradients are added to a list."""

    @tf.custom_gradient
    def noting(part: tf.Tensor) -> Any:
        def backward(gradient: Any) -> Any:
            gradients.append(numbers_of(gradient))
            return gradient

        return tf.identity(part), backward

    return noting(part)


@dataclasses.dataclass
class _BackwardUse:
    """The use of one weight by a backward pass.

    Attributes:
        read: the weight, as the forward pass has read it.
        views: the weight and what shows its numbers otherwise, in the forward pass.
        users: operations of the backward pass, with the view that they take.
    """

    read: _Read
    views: list[tf.Tensor]
    users: list[tuple[tf.Operation, tf.Tensor]]

    @property
    def first(self) -> tf.Operation:
        """The first operation of the backward pass that takes the weight."""
        return min((op for op, _ in self.users), key=number_of)


class WholeWeights:
    """Whole weights of one step of one replica."""

    def __init__(self) -> None:
        self._reads: list[_Read] = []
        self._layer: list[_Read] = []  # read for the layer that is traced now
        self._gate: list[tf.Tensor] = []  # what the gathers for this layer wait for

    def whole(self, weight: Any, part: tf.Tensor, gather: Gather, again: Gather) -> tf.Tensor:
        """Return the whole weight.

        Args:
            weight: the weight. A layer that reads it twice before it computes gathers it once.
            part: the replica's part of it.
            gather: makes the whole weight, through which gradients flow to the part.
            again: makes the whole weight in the backward pass.
        """
        if tf.executing_eagerly():
            return gather(part)
        starts = [_start_of_user(read) for read in self._layer]
        if None not in starts:
            self._gate, self._layer = [x for each in starts for x in each or ()], []
        for read in self._layer:
            if read.weight is weight and read.part.graph is part.graph:
                return read.whole
        gradients: list[tf.Tensor] = []
        with _after(self._gate, part):
            whole = gather(tf.identity(_noted(part, gradients)))
        self._reads.append(_Read(weight, part, whole, again, gradients))
        self._layer.append(self._reads[-1])
        return whole

    def gather_again(self, begin: int) -> None:
        """Let a backward pass take weights that are gathered again.

        Args:
            begin: number of the backward pass's first operation.
        """
        graph = tf.compat.v1.get_default_graph()
        own = [read for read in self._reads if read.part.graph is graph]
        uses = [use for read in own if (use := _backward_use(read, begin)) is not None]
        uses.sort(key=lambda use: number_of(use.first))
        for place, use in enumerate(uses):
            # The backward pass begins with the weight that the forward pass has read last.
            if place == 0 and use.read is own[-1]:
                continue
            _gather_again(use, begin, uses[:place])


def _backward_use(read: _Read, begin: int) -> _BackwardUse | None:
    views = [view for view in read.views() if number_of(view.op) < begin]
    users = [
        (op, view)
        for view in views
        for op in view.consumers()
        if number_of(op) >= begin and op.type not in _SHAPES
    ]
    return _BackwardUse(read, views, users) if users else None


def _gather_again(use: _BackwardUse, begin: int, before: list[_BackwardUse]) -> None:
    gate = _own_inputs((before or [use])[-1], begin)
    for earlier in before[:-1]:
        gate += earlier.read.gradients
    with _after([x for x in gate if number_of(x.op) < number_of(use.first)], use.read.part):
        copies = {use.read.whole.ref(): use.read.again(tf.identity(use.read.part))}
    for view in use.views[1:]:
        inputs = [copies.get(x.ref(), x) for x in view.op.inputs]
        made = another(view.op, inputs, f"{view.op.name}/again")
        copies |= {x.ref(): y for x, y in zip(view.op.outputs, made.outputs, strict=True)}
    for op, view in use.users:
        for position, x in enumerate(op.inputs):
            if x is view:
                replace_input(op, position, copies[view.ref()])


def _own_inputs(use: _BackwardUse, begin: int) -> list[tf.Tensor]:
    """Return what the backward pass itself gives to the first user of a weight."""
    return [x for x in use.first.inputs if number_of(x.op) >= begin]


def _start_of_user(read: _Read) -> list[tf.Tensor] | None:
    """Return tensors that exist when a weight's first user begins; None if nothing uses it yet."""
    views = list(read.views())
    users = [op for x in views for op in x.consumers() if op.type not in (*_VIEWS, *_SHAPES)]
    if not users:
        return None
    first = min(users, key=number_of)
    known = {x.ref() for x in views}
    return [x for x in first.inputs if _is_computed(x) and x.ref() not in known] or first.outputs


def _is_computed(x: tf.Tensor) -> bool:
    return bool(x.dtype != tf.resource and x.op.type != "Const")


def _after(gate: list[tf.Tensor], like: tf.Tensor) -> tf.control_dependencies:
    """Return a context whose operations wait for tensors."""
    own = [x for x in gate if x.graph is like.graph]
    return tf.control_dependencies([behind(x, f"{x.op.name}/gate").op for x in own])
