"""Reader of TensorFlow's graph of a training step.

tests/recompute/test_private.py guards the private names of TensorFlow that this package uses.
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.bridge.graphs import contents_of_handle, function_in, has_state
from tfscale.bridge.tensorflow import uses_onednn
from tfscale.training.recompute.traced_step import (
    ALIASES,
    Op,
    Piece,
    Tensor,
    TracedStep,
    Unit,
    is_convolution,
    runs_functions,
)
from tfscale.training.recompute.watch import Forward

# These operations give values without computing them.
GIVEN = frozenset({"Const", "NoOp", "Placeholder", "ReadVariableOp", "VarHandleOp"})
# TensorFlow counts these operations as stateful, but they only read.
READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})
# The results of these operations are as long as the rank of a tensor.
_FEW_NUMBERS = frozenset({"BroadcastGradientArgs"})
# The input that holds the length of a new list, which is still empty.
_LENGTH_OF_LIST = {"EmptyTensorList": 1, "TensorListReserve": 1}
_HOLD_NOTHING = (READS - {"ResourceGather"}) | _LENGTH_OF_LIST.keys()
_PASS_LISTS_ON = frozenset({"Identity", "StatelessWhile", "While", "ZerosLike"})
# Moving a byte takes about as long as this number of multiplications.
COST_OF_A_BYTE = 10
# The numbers in which oneDNN may keep a channel of a depthwise filter.
_BLOCK = 16 * 16
# Without oneDNN, TensorFlow writes so many bytes of images as columns at a time, or one image. In
# three dimensions it writes as many as the last cache holds (Eigen assumes a size if it finds
# none). If they were more than so many times as large as all inputs and results, Eigen computes in
# another way. That took up to the columns of two images in our measurements.
_COLUMNS = 30 << 20
_SMALLEST_CACHE = 512 << 10
_LAST_CACHE = 194  # glibc's _SC_LEVEL3_CACHE_SIZE, which Python has no name for
_MOST_COLUMNS = 25
_OF_EIGEN = 2


def read(
    forward: Forward,
    gradients: Sequence[Any],
    operations: Sequence[tf.Operation],
    originals: Sequence[tf.Operation] | None = None,
) -> TracedStep:
    """Return a graph's operations up to now, as a step.

    Args:
        forward: the forward pass in the graph.
        gradients: the gradients that the optimizer gets; None for variables without one.
        operations: the graph's list of operations.
        originals: the operations of which these are copies with known sizes, if they are. What may
            be computed again depends on what TensorFlow knows of the originals.
    """
    return _Reader(forward, operations, originals or operations).step(gradients)


class _Reader:
    def __init__(
        self,
        forward: Forward,
        operations: Sequence[tf.Operation],
        originals: Sequence[tf.Operation],
    ) -> None:
        self._forward = forward
        self._operations = operations
        self._originals = originals
        self._numbers: dict[tuple[str, int], int] = {}
        self._tensors: list[Tensor] = []
        self._given: set[str] = set()  # operations that depend on nothing but constants
        self._written = _written_resources(originals[forward.since :])

    def step(self, gradients: Sequence[Any]) -> TracedStep:
        for operation in self._operations:  # a loop may take what is made after it
            for tensor in operation.outputs:
                self._numbers[_key(tensor)] = len(self._numbers)
        ops = list(map(self._op, self._operations, self._originals))
        flat = tf.nest.flatten([g for g in gradients if g is not None], expand_composites=True)
        units = _single_units(self._forward)
        wanted = [self._numbers[_key(g)] for g in flat]
        constant = frozenset(
            number for (name, _), number in self._numbers.items() if name in self._given
        )
        since = self._forward.since
        live = _live(ops, wanted, since)
        for index in set(range(since)) - live:
            for tensor in ops[index].outputs:
                self._tensors[tensor] = replace(self._tensors[tensor], size=0)
        ops = [
            replace(
                op,
                inputs=op.inputs if index in live else (),
                cost=op.cost if index >= since else 0.0,
            )
            for index, op in enumerate(ops)
        ]
        begin = units[0].start
        unknown = tuple(
            operation.name
            for index, operation in enumerate(self._operations)
            if index in live and index >= begin and not has_known_sizes(operation)
        )
        step = TracedStep(ops, units, self._tensors, wanted, constant, unknown)
        return replace(step, units=_merged(step))

    def _op(self, operation: tf.Operation, original: tf.Operation) -> Op:
        inputs = list(operation.inputs)
        numbers = tuple(self._numbers[_key(tensor)] for tensor in inputs)
        lasting = not self._repeatable(original, list(original.inputs))
        outputs = []
        for position, tensor in enumerate(operation.outputs):
            number = len(self._tensors)
            # An operation of an earlier phase may already take a copy, which was made after it.
            alias = operation.type in ALIASES and numbers[position] < number
            home = self._tensors[numbers[position]].home if alias else number
            empty = operation.type in _HOLD_NOTHING
            size = 0 if empty else size_of(tensor)
            rank = original.outputs[position].shape.rank
            small = rank is not None and rank < 2 and tensor.dtype != tf.variant
            self._tensors.append(Tensor(size, home, lasting or small))
            outputs.append(number)
        cost, scratch = cost_of(operation, inputs), scratch_of(operation, inputs)
        return Op(operation.type, numbers, tuple(outputs), cost, scratch)

    def _repeatable(self, operation: tf.Operation, inputs: list[Any]) -> bool:
        """Return whether running the operation again gives the same numbers, at a cost."""
        if operation.type == "Const" or (
            inputs and all(tensor.op.name in self._given for tensor in inputs)
        ):
            self._given.add(operation.name)
            return False
        if operation.type in GIVEN or not self._is_mine(operation):
            return False
        if any(_key(tensor) in self._written for tensor in inputs):
            return False
        return not writes(operation)

    def _is_mine(self, operation: tf.Operation) -> bool:
        if self._forward.device is None or not operation.device:
            return True
        return short_device(operation.device) == short_device(self._forward.device)


def _live(ops: Sequence[Op], gradients: Sequence[int], since: int) -> set[int]:
    """Return the operations that gradients need or that have effects; all others are pruned.

    Effects of earlier phases, which end at ``since``, are over.
    """
    producer = {tensor: index for index, op in enumerate(ops) for tensor in op.outputs}
    waiting = [producer[tensor] for tensor in gradients]
    waiting += [
        index
        for index, op in enumerate(ops)
        if index >= since and is_stateful(op.kind) and op.kind not in READS
    ]
    live: set[int] = set()
    while waiting:
        index = waiting.pop()
        if index not in live:
            live.add(index)
            waiting += [producer[tensor] for tensor in ops[index].inputs]
    return live


def short_device(device: str) -> str:
    """Return the last part of a device's name; the other parts may be missing."""
    return device.rsplit("/", 1)[-1].lower()


# ------------------------------------------------------------------ units


def _single_units(forward: Forward) -> list[Unit]:
    return [
        Unit(_name(piece), frozenset(piece.layers), piece.start, piece.stop, range(i, i + 1))
        for i, piece in enumerate(forward.pieces())
    ]


def _name(piece: Piece) -> str:
    return "/".join(piece.layers[1:] or piece.layers) or "between calls"


def _merged(step: TracedStep) -> list[Unit]:
    """Join units so that no cut separates operations that TensorFlow can fuse.

    TensorFlow fuses an operation with the only user of its result, and a fused operation may round
    differently. To compute the same bits again, a cut must not separate operations that TensorFlow
    would fuse, nor create new ones that it can fuse.
    """
    users = _users_of_homes(step)
    fused = {
        border
        for op in range(step.begin, step.end)
        for tensor in step.ops[op].outputs
        if users[step.tensors[tensor].home] == 1 and not step.tensors[tensor].lasting
        for user in step.consumers[tensor]
        if user < step.end
        for border in range(step.unit_of[op] + 1, step.unit_of[user] + 1)
    }
    units: list[Unit] = []
    for number, unit in enumerate(step.units):
        if units and (number in fused or unit.start == unit.stop):
            units[-1] = _joined(units[-1], unit)
        else:
            units.append(unit)
    return units


def _users_of_homes(step: TracedStep) -> Counter[int]:
    """Return how many operations use each tensor's memory."""
    return Counter(
        step.tensors[tensor].home
        for op in step.ops
        if op.kind not in ALIASES
        for tensor in op.inputs
    )


def _joined(one: Unit, other: Unit) -> Unit:
    if other.start == other.stop:
        name, layers = one.name, one.layers
    elif one.start == one.stop:
        name, layers = other.name, other.layers
    else:
        names = dict.fromkeys([*one.name.split(" + "), *other.name.split(" + ")])
        name, layers = " + ".join(names), one.layers | other.layers
    return Unit(name, layers, one.start, other.stop, range(one.pieces.start, other.pieces.stop))


# ------------------------------------------------------------------ state


def writes(operation: tf.Operation) -> bool:
    """Return whether an operation has effects, draws or sends: it must not run twice then."""
    if operation.type in READS:
        return False
    functions = _functions_of(operation)
    if functions:
        return any(_function_writes(operation.graph, name) for name in functions)
    return is_stateful(operation.type)


def _functions_of(operation: tf.Operation) -> list[str]:
    if not runs_functions(operation.type):
        return []
    found = []
    for value in operation.node_def.attr.values():
        for function in [value.func, *value.list.func]:
            if function.name:
                found.append(function.name)
    return found


def _function_writes(graph: tf.Graph, name: str) -> bool:
    for node in function_in(graph, name).cached_definition.node_def:
        inner = [
            function.name
            for value in node.attr.values()
            for function in [value.func, *value.list.func]
            if function.name
        ]
        if inner:
            if any(_function_writes(graph, function) for function in inner):
                return True
        elif node.op not in READS and is_stateful(node.op):
            return True
    return False


@functools.cache
def is_stateful(kind: str) -> bool:
    """Return whether TensorFlow considers this kind of operation stateful."""
    return has_state(kind)


def _written_resources(operations: Iterable[tf.Operation]) -> set[tuple[str, int]]:
    """Return the variables and other resources that this graph has changed so far."""
    return {
        _key(tensor)
        for operation in operations
        for tensor in operation.inputs
        if tensor.dtype == tf.resource and writes(operation)
    }


def _key(tensor: Any) -> tuple[str, int]:
    return tensor.op.name, tensor.value_index


# ------------------------------------------------------------ sizes and costs


def size_of(tensor: Any) -> int:
    """Return the bytes of a tensor; 0 for handles and unknown shapes."""
    if tensor.dtype == tf.resource:
        return 0
    if tensor.dtype == tf.variant:
        return _list_size(tensor)
    count = tensor.shape.num_elements()
    return (count or 0) * int(tensor.dtype.size)


def has_known_sizes(operation: tf.Operation) -> bool:
    """Return whether the bytes of all results of an operation are known."""
    if operation.type in _FEW_NUMBERS:
        return True
    return all(_has_known_size(tensor) for tensor in operation.outputs)


def _has_known_size(tensor: Any) -> bool:
    if tensor.dtype == tf.resource:
        return True
    if tensor.dtype == tf.variant:
        is_list = bool(contents_of_handle(tensor))
        return not is_list or _list_size(tensor) > 0
    return bool(tensor.shape.is_fully_defined())


def _list_size(tensor: Any) -> int:
    """Return the bytes of a list of tensors in a loop: the elements' size times their number."""
    data = contents_of_handle(tensor)
    length = _list_length(tensor)
    if not data or not length:
        return 0
    shape = tf.TensorShape(data[0].shape)
    return length * (shape.num_elements() or 0) * int(tf.as_dtype(data[0].dtype).size)


def _list_length(tensor: Any) -> int:
    """Return the length of a list, from the operation that made it; 0 if it is unknown."""
    operation = tensor.op
    while operation.type in _PASS_LISTS_ON:
        tensor = operation.inputs[tensor.value_index]
        operation = tensor.op
    if operation.type == "TensorListFromTensor":
        return int(operation.inputs[0].shape[0] or 0)
    position = _LENGTH_OF_LIST.get(operation.type)
    return 0 if position is None else _known_length(operation.inputs[position])


def _known_length(tensor: Any) -> int:
    """Return the value of a list's length. A loop gives the maximum of a constant: its steps."""
    value = tf.get_static_value(tensor.op.inputs[0] if tensor.op.type == "Max" else tensor)
    return 0 if value is None else max(0, int(np.max(value)))


def scratch_of(operation: tf.Operation, inputs: list[Any]) -> int:
    """Return the bytes that an operation takes beside its results while it runs."""
    if not is_convolution(operation.type):
        return 0
    return (_scratch_of_onednn if uses_onednn() else _scratch_of_columns)(operation, inputs)


def _scratch_of_onednn(operation: tf.Operation, inputs: list[Any]) -> int:
    """Return the size of copies: oneDNN orders the numbers of a filter in another way.

    For the gradient of a depthwise filter it may widen each channel to a block of 16 x 16.
    """
    widens = operation.type == "DepthwiseConv2dNativeBackpropFilter"
    return size_of(_filter_of(operation, inputs)) * (_BLOCK if widens else 1)


def _scratch_of_columns(operation: tf.Operation, inputs: list[Any]) -> int:
    """Return the size of columns: the gradients of a convolution are products with a matrix.

    It has a row for each place of an image, with all numbers that the filter meets there. The
    gradients of the input and of the filter run at the same time, and each makes a matrix.
    """
    kind, backward, _ = operation.type.partition("Backprop")
    if not backward or kind not in _columns_at_once():
        return 0
    filters, results = size_of(_filter_of(operation, inputs)), size_of(inputs[2])
    images, channels = _length(inputs[2], 0), _length(inputs[2], -1)
    one = _count(inputs[2]) / images / channels * filters / channels
    at_once = math.ceil(_columns_at_once()[kind] / (one + filters + results / images))
    if kind == "Conv3D":
        whole = size_of(_input_of(operation, inputs)) + filters + results
        if at_once * one > _MOST_COLUMNS * whole:
            at_once = _OF_EIGEN
    return 2 * int(min(images, at_once) * one)


@functools.cache
def _columns_at_once() -> dict[str, int]:
    """Return how many bytes of columns TensorFlow makes at a time, beside those of one image."""
    return {"Conv2D": _COLUMNS, "Conv3D": max(os.sysconf(_LAST_CACHE), _SMALLEST_CACHE)}


def _input_of(operation: tf.Operation, inputs: list[Any]) -> Any:
    """Return the images of a convolution, or their gradient."""
    return operation.outputs[0] if "BackpropInput" in operation.type else inputs[0]


def _filter_of(operation: tf.Operation, inputs: list[Any]) -> Any:
    """Return the filter of a convolution, or its gradient."""
    return operation.outputs[0] if "BackpropFilter" in operation.type else inputs[1]


def cost_of(operation: tf.Operation, inputs: list[Any]) -> float:
    """Return the cost of an operation: its multiplications, and the cost of moving its bytes."""
    if operation.type in ALIASES or operation.type in GIVEN:
        return 0.0
    moved = sum(map(size_of, inputs)) + sum(map(size_of, operation.outputs))
    return _multiplications(operation, inputs) + COST_OF_A_BYTE * moved


def _multiplications(operation: tf.Operation, inputs: list[Any]) -> float:
    kind = operation.type
    if kind in ("MatMul", "BatchMatMulV2", "BatchMatMulV3"):
        transposed = operation.get_attr("transpose_a" if kind == "MatMul" else "adj_x")
        return _count(operation.outputs[0]) * _length(inputs[0], -2 if transposed else -1)
    if kind == "Einsum":
        return _einsum(operation.get_attr("equation").decode(), inputs)
    if "Conv" in kind and "BackpropFilter" in kind:
        return _count(inputs[2]) * _count(operation.outputs[0]) / _length(operation.outputs[0], -1)
    if "Conv" in kind and "BackpropInput" in kind:
        return _count(inputs[2]) * _count(inputs[1]) / _length(inputs[1], -1)
    if kind in ("Conv2D", "Conv3D"):
        return _count(operation.outputs[0]) * _count(inputs[1]) / _length(inputs[1], -1)
    if kind == "DepthwiseConv2dNative":
        return _count(operation.outputs[0]) * _count(inputs[1]) / max(1, _length(inputs[1], -2))
    return 0.0


def _count(tensor: Any) -> float:
    return float(tensor.shape.num_elements() or 0)


def _length(tensor: Any, axis: int) -> float:
    known = tensor.shape.rank is not None and tensor.shape.rank >= abs(axis)
    return float(tensor.shape[axis] or 1) if known else 1.0


def _einsum(equation: str, inputs: list[Any]) -> float:
    """Return the product of all letters' lengths."""
    lengths: dict[str, float] = {}
    for letters, tensor in zip(equation.split("->")[0].split(","), inputs):
        sizes = tensor.shape.as_list() if tensor.shape.rank is not None else []
        head, dots, tail = letters.partition("...")
        named = list(zip(head, sizes)) + list(zip(reversed(tail), reversed(sizes)))
        between = sizes[len(head) : len(sizes) - len(tail)] if dots else []
        lengths.update({letter: float(size or 1) for letter, size in named})
        lengths.update({f".{i}": float(size or 1) for i, size in enumerate(reversed(between))})
    return math.prod(lengths.values())
