"""A training step as a list of operations, and the recomputation of some of them.

Nothing here knows TensorFlow. Operations stand in the order in which they were made: first the
model's own (the forward pass, cut into units), then all others. Those others that need the model's
tensors are the backward pass. Tensors are numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

# These operations need a tensor's shape, not its numbers: they run early and hold nothing.
SHAPES = frozenset({"Shape", "ShapeN", "Rank", "Size"})
# The result of these operations lives in the memory of the input with the same position.
ALIASES = frozenset(
    {
        "CheckNumerics",
        "ExpandDims",
        "Identity",
        "IdentityN",
        "PreventGradient",
        "Reshape",
        "Snapshot",
        "Squeeze",
        "StopGradient",
    }
)


def is_convolution(kind: str) -> bool:
    """Return whether operations of a kind are convolutions, or gradients of convolutions."""
    return kind.startswith(("Conv2D", "Conv3D", "DepthwiseConv2d"))


def runs_functions(kind: str) -> bool:
    """Return whether operations of a kind run functions: calls, loops and branches."""
    return any(part in kind for part in ("Call", "While", "If", "Case", "Scan", "Map"))


@dataclass(frozen=True)
class Op:
    """An operation.

    Args:
        kind: its kind.
        inputs: the tensors that it takes.
        outputs: the tensors that it makes.
        cost: its cost, in multiplications, say.
        scratch: bytes that it takes beside its outputs while it runs.
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost: float = 0.0
    scratch: int = 0


@dataclass(frozen=True)
class Piece:
    """Consecutive operations of a layer. ``layers`` are the running layers, from outer to inner."""

    layers: tuple[str, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Unit:
    """Consecutive operations that are computed again together, or not at all.

    Args:
        name: name of the running layers.
        layers: the running layers, and those around them.
        start: the first operation.
        stop: the operation after the last one.
        pieces: the unit's pieces, whose numbers are equal in every trace of the model.
    """

    name: str
    layers: frozenset[str]
    start: int
    stop: int
    pieces: range


@dataclass(frozen=True)
class Tensor:
    """The properties of a tensor.

    Args:
        size: number of bytes.
        home: the tensor whose memory it lives in; often itself.
        lasting: whether it is never computed again, because it can't be or is too small to matter.
    """

    size: int
    home: int
    lasting: bool = False


@dataclass(frozen=True)
class Again:
    """Operations that are computed again together.

    Args:
        ops: the operations, in order.
        tensors: their results that these operations themselves or later ones use.
        before: the first operation of the backward pass that needs the results.
    """

    ops: tuple[int, ...]
    tensors: frozenset[int]
    before: int


ORIGINAL = -1  # the version of a tensor that the forward pass has computed


class Versions:
    """The versions of tensors that are computed several times: everybody takes the newest.

    Args:
        again: what is computed again, sorted by ``before``. A version is a place in this list.
    """

    def __init__(self, again: Sequence[Again]) -> None:
        self._again = again
        self._of: dict[int, list[int]] = {}
        for number, one in enumerate(again):
            for tensor in one.tensors:
                self._of.setdefault(tensor, []).append(number)

    @property
    def tensors(self) -> list[int]:
        """The tensors that have several versions."""
        return sorted(self._of)

    def for_op(self, op: int, tensor: int) -> int:
        """Return the version of a tensor that an operation of the backward pass takes."""
        versions = (n for n in self._of.get(tensor, ()) if self._again[n].before <= op)
        return max(versions, default=ORIGINAL)

    def for_copy(self, number: int, tensor: int) -> int:
        """Return the version of a tensor that operations take which are computed again."""
        versions = (n for n in self._of.get(tensor, ()) if n <= number)
        return max(versions, default=ORIGINAL)


@dataclass(frozen=True)
class TracedStep:
    """One step up to its gradients.

    Args:
        ops: all operations in the order in which they were made.
        units: consecutive units; together they are the forward pass.
        tensors: all tensors, by number.
        gradients: the tensors that the optimizer gets.
        constant: the tensors that depend on nothing but constants.
        unknown: names of operations with results of unknown size, which counts as 0.
        followed: whether ``fit`` traces the same results, so that a plan of single results fits.
    """

    ops: Sequence[Op]
    units: Sequence[Unit]
    tensors: Sequence[Tensor]
    gradients: Sequence[int] = field(default=())
    constant: frozenset[int] = frozenset()
    unknown: tuple[str, ...] = ()
    followed: bool = True

    @property
    def steps(self) -> tuple[TracedStep, ...]:
        """The phases of the step: this one."""
        return (self,)

    @property
    def begin(self) -> int:
        """The first operation of the forward pass."""
        return self.units[0].start

    @property
    def end(self) -> int:
        """The first operation after the forward pass."""
        return self.units[-1].stop

    @cached_property
    def producer(self) -> list[int]:
        """The producer of each tensor."""
        result = [0] * len(self.tensors)
        for index, op in enumerate(self.ops):
            for tensor in op.outputs:
                result[tensor] = index
        return result

    @cached_property
    def consumers(self) -> list[list[int]]:
        """The consumers of each tensor, without operations that need only its shape."""
        result: list[list[int]] = [[] for _ in self.tensors]
        for index, op in enumerate(self.ops):
            if op.kind not in SHAPES:
                for tensor in op.inputs:
                    result[tensor].append(index)
        return result

    @cached_property
    def shapes(self) -> list[list[int]]:
        """The operations that need only a tensor's shape, by tensor."""
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
        """Bytes of each weight that the optimizer changes, which equal those of its gradient."""
        return [self.tensors[tensor].size for tensor in self.gradients]

    @cached_property
    def convolutions(self) -> int:
        """Number of the convolutions, with those of the backward pass."""
        return sum(is_convolution(op.kind) for op in self.ops)

    @cached_property
    def digest(self) -> str:
        """A short text that two steps share only if they have the same operations and sizes."""
        ops = [(op.kind, op.inputs, op.outputs) for op in self.ops]
        sizes = [known.size for known in self.tensors]
        units = [(unit.start, unit.stop) for unit in self.units]
        return hashlib.sha256(repr((ops, sizes, units)).encode()).hexdigest()[:16]

    @property
    def cost(self) -> float:
        """Cost of the whole step."""
        return sum(op.cost for op in self.ops)

    def ops_of(self, segment: range) -> range:
        """Return the operations of consecutive units."""
        return range(self.units[segment[0]].start, self.units[segment[-1]].stop)

    def again(self, inside: range) -> Again | None:
        """Return the operations that a segment computes again for the backward pass; None if none.

        Results that other units use stay in memory, and so do lasting tensors. All other results
        that the backward pass needs are freed, and computed again from those that stay.
        """
        leaving = self._leaving_homes(inside)

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

    def _leaving_homes(self, inside: range) -> set[int]:
        forward = range(self.begin, self.end)
        return {
            self.tensors[tensor].home
            for tensor in self._outputs(inside)
            if any(index in forward and index not in inside for index in self.consumers[tensor])
        }


@dataclass(frozen=True)
class Phases:
    """A training step that applies gradients several times, each time after a new forward pass.

    Args:
        steps: the phases. They run one after the other.
    """

    steps: tuple[TracedStep, ...]
