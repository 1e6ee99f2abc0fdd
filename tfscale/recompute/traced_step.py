"""A training step as a list of operations, and what it means to compute some of them again.

Nothing here knows TensorFlow. Operations stand in the order in which they were made: the
model's own first (the forward pass, cut into units), then all others, of which those that
need the model's tensors are the backward pass. Tensors are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

# Need a tensor's shape, not its numbers: they run early and hold nothing.
SHAPES = frozenset({"Shape", "ShapeN", "Rank", "Size"})


@dataclass(frozen=True)
class Op:
    """One operation: what it takes and gives, and what it costs (in multiplications, say)."""

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost: float = 0.0


@dataclass(frozen=True)
class Unit:
    """Consecutive operations that are computed again together, or not at all.

    Args:
        name: of the layers at work.
        layers: these, and those around them.
        start: the first operation.
        stop: the first operation behind it.
        pieces: the same in pieces, which are numbered alike in every trace of the model.
    """

    name: str
    layers: frozenset[str]
    start: int
    stop: int
    pieces: range


@dataclass(frozen=True)
class Tensor:
    """What is known of a tensor.

    Args:
        size: bytes.
        home: the tensor whose memory it lives in; often itself.
        lasting: never computed again, because it can't be or is too small to matter.
    """

    size: int
    home: int
    lasting: bool = False


@dataclass(frozen=True)
class Again:
    """What a segment computes again.

    Args:
        ops: which operations, in order.
        tensors: their results that these operations themselves or later ones use.
        before: the first operation that needs it.
    """

    ops: tuple[int, ...]
    tensors: frozenset[int]
    before: int


@dataclass(frozen=True)
class TracedStep:
    """One step up to its gradients.

    Args:
        ops: all operations in the order in which they were made.
        units: consecutive; together they are the forward pass.
        tensors: all tensors, by number.
        gradients: the tensors that the optimizer gets.
        constant: the tensors that depend on nothing but constants.
        unknown: names of operations with results of unknown size, which counts as 0.
    """

    ops: Sequence[Op]
    units: Sequence[Unit]
    tensors: Sequence[Tensor]
    gradients: Sequence[int] = field(default=())
    constant: frozenset[int] = frozenset()
    unknown: tuple[str, ...] = ()

    @property
    def begin(self) -> int:
        """The first operation of the forward pass."""
        return self.units[0].start

    @property
    def end(self) -> int:
        """The first operation behind the forward pass."""
        return self.units[-1].stop

    @cached_property
    def producer(self) -> list[int]:
        """Of each tensor."""
        result = [0] * len(self.tensors)
        for index, op in enumerate(self.ops):
            for tensor in op.outputs:
                result[tensor] = index
        return result

    @cached_property
    def consumers(self) -> list[list[int]]:
        """Of each tensor; operations that want only shapes do not count."""
        result: list[list[int]] = [[] for _ in self.tensors]
        for index, op in enumerate(self.ops):
            if op.kind not in SHAPES:
                for tensor in op.inputs:
                    result[tensor].append(index)
        return result

    @cached_property
    def shapes(self) -> list[list[int]]:
        """Of each tensor the operations that want only its shape."""
        result: list[list[int]] = [[] for _ in self.tensors]
        for index, op in enumerate(self.ops):
            if op.kind in SHAPES:
                for tensor in op.inputs:
                    result[tensor].append(index)
        return result

    @cached_property
    def unit_of(self) -> dict[int, int]:
        """The unit of each operation of the forward pass."""
        return {
            op: number
            for number, unit in enumerate(self.units)
            for op in range(unit.start, unit.stop)
        }

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest result that the forward pass may compute again."""
        made = (self.tensors[t] for t in self._outputs(range(self.begin, self.end)))
        return max((known.size for known in made if not known.lasting), default=0)

    @cached_property
    def updated(self) -> list[int]:
        """Bytes of each weight that the optimizer changes: as many as of its gradient."""
        return [self.tensors[tensor].size for tensor in self.gradients]

    @property
    def cost(self) -> float:
        """Of the whole step."""
        return sum(op.cost for op in self.ops)

    def ops_of(self, segment: range) -> range:
        """The operations of consecutive units."""
        return range(self.units[segment[0]].start, self.units[segment[-1]].stop)

    def again(self, inside: range) -> Again | None:
        """What consecutive operations compute again for the backward pass, if anything.

        Their results that other units use stay in memory, and so do lasting tensors. All others
        that the backward pass needs are freed, and computed again from those.
        """
        leaving = self._homes_of_what_leaves(inside)

        def lost(tensor: int) -> bool:
            known = self.tensors[tensor]
            return (
                self.producer[tensor] in inside
                and not known.lasting
                and not self.tensors[known.home].lasting
                and known.home not in leaving
            )

        users = [
            (tensor, index)
            for tensor in self._outputs(inside)
            for index in self.consumers[tensor]
            if index >= self.end and lost(tensor)
        ]
        if not users:
            return None
        needed: set[int] = set()
        waiting = [self.producer[tensor] for tensor, _ in users]
        while waiting:
            index = waiting.pop()
            if index not in needed:
                needed.add(index)
                waiting += [self.producer[t] for t in self.ops[index].inputs if lost(t)]
        taken = frozenset(t for index in needed for t in self.ops[index].outputs if lost(t))
        return Again(tuple(sorted(needed)), taken, min(index for _, index in users))

    def _outputs(self, ops: range) -> list[int]:
        return [tensor for index in ops for tensor in self.ops[index].outputs]

    def _homes_of_what_leaves(self, inside: range) -> set[int]:
        forward = range(self.begin, self.end)
        return {
            self.tensors[tensor].home
            for tensor in self._outputs(inside)
            if any(index in forward and index not in inside for index in self.consumers[tensor])
        }
