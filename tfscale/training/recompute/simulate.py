"""Simulation of a step's memory at each moment, with and without recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tfscale.training.recompute.traced_step import ORIGINAL, SHAPES, Again, Op, TracedStep, Versions

# These operations may write their result into the memory of an input that nothing else needs.
IN_PLACE = frozenset(
    {
        "Abs",
        "Add",
        "AddN",
        "AddV2",
        "BiasAdd",
        "Cast",
        "Div",
        "DivNoNan",
        "Elu",
        "EluGrad",
        "Erf",
        "Exp",
        "FusedBatchNormV3",
        "LeakyRelu",
        "LeakyReluGrad",
        "Log",
        "LogSoftmax",
        "Maximum",
        "Minimum",
        "Mul",
        "MulNoNan",
        "Neg",
        "Pow",
        "RealDiv",
        "Reciprocal",
        "Relu",
        "Relu6",
        "Relu6Grad",
        "ReluGrad",
        "Rsqrt",
        "RsqrtGrad",
        "Selu",
        "SeluGrad",
        "Sigmoid",
        "SigmoidGrad",
        "Softmax",
        "Softplus",
        "SoftplusGrad",
        "Sqrt",
        "SqrtGrad",
        "Square",
        "SquaredDifference",
        "Sub",
        "Tanh",
        "TanhGrad",
        "Xdivy",
        "Xlogy",
    }
)

Home = tuple[int, int]  # a tensor, and its version


@dataclass(frozen=True)
class Moment:
    """A running operation, and the version of its results."""

    op: int
    version: int = ORIGINAL


def moments_of(step: TracedStep, again: Sequence[Again]) -> Iterator[Moment]:
    """Yield all operations in order; what is computed again runs just before its first use."""
    first: dict[int, list[int]] = {}
    for number, one in enumerate(again):
        first.setdefault(one.before, []).append(number)
    for index in range(len(step.ops)):
        for number in first.get(index, ()):
            yield from (Moment(op, number) for op in _as_they_get_ready(step, again[number]))
        yield Moment(index)


def _as_they_get_ready(step: TracedStep, again: Again) -> list[int]:
    """Return operations that are computed again, in the order in which TensorFlow runs them.

    TensorFlow runs what is ready first. So if an event computes many results from others that are
    in memory, all their first operations run before the second ones, and all intermediate results
    are in memory at the same time.
    """
    inside = set(again.ops)
    waits, users = dict.fromkeys(again.ops, 0), dict[int, list[int]]()
    for op in again.ops:
        made = (step.producer[tensor] for tensor in step.ops[op].inputs if tensor in again.tensors)
        for maker in inside.intersection(made):
            waits[op] += 1
            users.setdefault(maker, []).append(op)
    ready = [op for op in again.ops if not waits[op]]
    for op in ready:  # grows while it is read
        for user in users.get(op, ()):
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
    return ready


def memory(step: TracedStep, again: Sequence[Again] = (), pile_up: bool = False) -> list[int]:
    """Return the bytes in use while each operation runs, plus a large result of another operation.

    TensorFlow runs operations at the same time if neither waits for the other.

    Args:
        step: the step.
        again: the operations that are computed again, sorted by ``before``.
        pile_up: whether all gradients stay until the last one exists, and one moment longer, in
            which they exist twice, since replicas exchange (or clip, or scale) them.
    """
    return _Memory(step, again, pile_up).run()[0]


def memory_with_rest(step: TracedStep, pile_up: bool = False) -> tuple[list[int], list[int]]:
    """Return the bytes in use while each operation runs, and those that stay behind it."""
    return _Memory(step, (), pile_up).run()


class _Memory:
    def __init__(self, step: TracedStep, again: Sequence[Again], pile_up: bool) -> None:
        self._step = step
        self._moments = list(moments_of(step, again))
        self._versions = Versions(again)
        self._pile_up = pile_up
        self._last_use = self._find_last_uses()
        self._size: dict[Home, int] = {}

    def run(self) -> tuple[list[int], list[int]]:
        result, rest, live = [], [], 0
        ends: list[list[Home]] = [[] for _ in self._moments]
        for home, last in self._last_use.items():
            ends[last].append(home)
        for now, moment in enumerate(self._moments):
            live += self._allocate(now, moment, self._step.ops[moment.op])
            result.append(live + self._step.ops[moment.op].scratch + self._step.largest)
            live -= sum(self._size.pop(home, 0) for home in ends[now])
            rest.append(live + self._step.largest)
        if self._pile_up:
            result.append(2 * sum(self._step.tensors[home].size for home in self._gradients()))
        return result, rest

    def _allocate(self, now: int, moment: Moment, op: Op) -> int:
        """Allocate the outputs; return the number of additional bytes."""
        new = 0
        for tensor in op.outputs:
            known = self._step.tensors[tensor]
            if known.home != tensor or not known.size:
                continue
            if op.kind not in IN_PLACE or not self._takes_over(now, moment, op, known.size):
                new += known.size
            self._size[tensor, moment.version] = known.size
        return new

    def _takes_over(self, now: int, moment: Moment, op: Op, size: int) -> bool:
        for tensor in op.inputs:
            home = self._home(moment, tensor)
            if self._last_use[home] == now and self._size.get(home) == size:
                del self._size[home]
                return True
        return False

    def _home(self, moment: Moment, tensor: int) -> Home:
        """Return the home of the tensor that an operation takes."""
        version = ORIGINAL
        if moment.version != ORIGINAL:
            version = self._versions.for_copy(moment.version, tensor)
        elif moment.op >= self._step.end:
            version = self._versions.for_op(moment.op, tensor)
        root = self._step.tensors[tensor].home
        # A copy of a reshape, say, may take a version that is older than the copy.
        return root, version if version == ORIGINAL else self._versions.for_copy(version, root)

    def _find_last_uses(self) -> dict[Home, int]:
        result: dict[Home, int] = {}
        for now, moment in enumerate(self._moments):
            op = self._step.ops[moment.op]
            result.update(
                {(t, moment.version): now for t in op.outputs if self._step.tensors[t].home == t}
            )
            if op.kind not in SHAPES:
                result.update({self._home(moment, tensor): now for tensor in op.inputs})
        if self._pile_up:
            result.update({(home, -1): len(self._moments) - 1 for home in self._gradients()})
        return result

    def _gradients(self) -> set[int]:
        return {self._step.tensors[tensor].home for tensor in self._step.gradients}
