"""Counts of a layer's work and memory, in the graph that TensorFlow makes of it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

# Operations that move or name numbers, and compute none.
_FREE = re.compile(
    r"Const|Placeholder|Identity\w*|NoOp|ReadVariableOp|Reshape|ExpandDims|Squeeze|Shape\w*|Pack|"
    r"Unpack|StridedSlice\w*|Slice|Cast|Transpose|ConcatV2|Split\w*|Fill|ZerosLike|OnesLike|Range|"
    r"BroadcastTo|BroadcastGradientArgs|Gather\w*|TensorList\w*|StopGradient|InvertPermutation|"
    r"Tile|Pad\w*|Rank|Size|Assert|ControlTrigger|PreventGradient|Assign\w*|Stateless(?!While)\w*|"
    r"Random\w*|ResourceGather|VariableShape|DynamicStitch|ConcatOffset|ReverseV2|ReverseSequence"
)


@dataclasses.dataclass(frozen=True)
class Counted:
    """Work and memory of a layer for one sample.

    Args:
        flops: operations of the forward pass.
        backward_flops: operations of the backward pass.
        inputs: bytes of inputs.
        outputs: bytes of outputs.
        kept: bytes of the forward pass that the backward pass reads, without weights, and without
            the outputs, which are the inputs of the next layer.
        input_height: size of the first axis of space of an image; 0 if the input is none.
    """

    flops: float
    backward_flops: float
    inputs: float
    outputs: float
    kept: float
    input_height: int


def count(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Counted:
    """Trace a layer and its gradient on specs of one sample, and count both."""
    import tensorflow as tf

    leaves = tf.nest.flatten((args, kwargs))
    specs = [leaf for leaf in leaves if isinstance(leaf, tf.TensorSpec)]
    seen: dict[str, Any] = {}

    def run(*tensors: Any) -> list[Any]:
        given = iter(tensors)
        full = [next(given) if isinstance(leaf, tf.TensorSpec) else leaf for leaf in leaves]
        own_args, own_kwargs = tf.nest.pack_sequence_as((args, kwargs), full)
        floats = [tensor for tensor in tensors if tensor.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            outputs = layer(*own_args, **own_kwargs)
        seen["outputs"] = [one for one in tf.nest.flatten(outputs) if isinstance(one, tf.Tensor)]
        seen["forward"] = len(tf.compat.v1.get_default_graph().get_operations())
        weights = [weight.value for weight in layer.trainable_weights]
        targets = [one for one in seen["outputs"] if one.dtype.is_floating]
        gradients = tape.gradient(targets, floats + weights) if targets else []
        return [tf.convert_to_tensor(one) for one in gradients if one is not None]

    graph = tf.function(run).get_concrete_function(*specs).graph
    operations = graph.get_operations()
    forward, backward = operations[: seen["forward"]], operations[seen["forward"] :]
    loop = _loop_flops(forward, layer, _steps(specs))
    heights = [spec.shape[1] for spec in specs if spec.shape.rank == 4]
    return Counted(
        flops=_flops(forward) + loop,
        backward_flops=_flops(backward) + 2 * loop,
        inputs=sum(map(_bytes, specs)),
        outputs=sum(map(_bytes, seen["outputs"])),
        kept=_kept(forward, backward, seen["outputs"]),
        input_height=heights[0] or 0 if heights else 0,
    )


def _steps(specs: Iterable[Any]) -> int:
    """Return the number of steps of loops in a layer: the longest sequence it reads."""
    lengths = [spec.shape[1] or 1 for spec in specs if spec.shape.rank == 3]
    return max([1, *lengths])


def _flops(operations: Iterable[Any]) -> float:
    return float(sum(_OF.get(op.type, _one_each)(op) for op in operations))


def _loop_flops(operations: Iterable[Any], layer: Any, steps: int) -> float:
    """Return the operations of a loop over a sequence: a product with each weight in each step."""
    loops = sum(op.type in ("While", "StatelessWhile") for op in operations)
    return 2.0 * steps * sum(_size(one.value) for one in layer.trainable_weights) if loops else 0


def _kept(forward: list[Any], backward: list[Any], outputs: list[Any]) -> float:
    """Return the bytes of forward tensors that backward operations read; no weights, no outputs."""
    names = {op.name for op in forward}
    read = {tensor.name: tensor for op in backward for tensor in op.inputs}
    for tensor in outputs:
        read.pop(tensor.name, None)
    return sum(
        _bytes(tensor)
        for tensor in read.values()
        if tensor.op.name in names and not _is_weight(tensor.op)
    )


def _is_weight(op: Any) -> bool:
    """Return whether an operation gives a weight or a constant, perhaps cast or reshaped."""
    while op.type in ("Cast", "Identity", "Reshape", "Transpose") and op.inputs:
        op = op.inputs[0].op
    return op.type in ("ReadVariableOp", "Const", "Shape", "ShapeN") or (
        op.type == "Placeholder" and op.outputs[0].dtype.name == "resource"
    )


def _bytes(tensor: Any) -> float:
    return float(_size(tensor) * tensor.dtype.size) if tensor.dtype.size else 0.0


def _size(tensor: Any) -> int:
    """Return the number of elements; unknown sizes count as 1."""
    shape = tensor.shape
    return math.prod(size or 1 for size in shape) if shape.rank is not None else 1


def _one_each(op: Any) -> float:
    if _FREE.fullmatch(op.type):
        return 0
    return float(sum(_size(out) for out in op.outputs if out.dtype.is_floating))


def _matmul(op: Any) -> float:
    inner = op.inputs[0].shape[-2 if op.get_attr("transpose_a") else -1] or 1
    return 2.0 * inner * _size(op.outputs[0])


def _batch_matmul(op: Any) -> float:
    inner = op.inputs[0].shape[-2 if op.get_attr("adj_x") else -1] or 1
    return 2.0 * inner * _size(op.outputs[0])


def _einsum(op: Any) -> float:
    labels: dict[str, int] = {}
    terms = op.get_attr("equation").decode().split("->")[0].split(",")
    for term, tensor in zip(terms, op.inputs):
        named = term.replace("...", "")
        sizes = list(tensor.shape)
        labels |= {
            letter: size or 1 for letter, size in zip(named, sizes[len(sizes) - len(named) :])
        }
    return 2.0 * math.prod(labels.values()) if len(terms) > 1 else 0.0


def _convolution(
    filters: Callable[[Any], list[int]], image: Callable[[Any], Any]
) -> Callable[[Any], float]:
    """Return a counter of convolutions: each output pixel takes one product per filter's number."""

    def of(op: Any) -> float:
        shape = filters(op)
        pixels = _size(image(op)) / (image(op).shape[-1] or 1)
        return 2.0 * pixels * math.prod(shape)

    return of


def _in(number: int) -> Callable[[Any], Any]:
    return lambda op: op.inputs[number]


def _out(op: Any) -> Any:
    return op.outputs[0]


def _shape(tensor: Callable[[Any], Any]) -> Callable[[Any], list[int]]:
    return lambda op: [size or 1 for size in tensor(op).shape]


_OF: dict[str, Callable[[Any], float]] = {
    "MatMul": _matmul,
    "BatchMatMulV2": _batch_matmul,
    "Einsum": _einsum,
    "Conv2D": _convolution(_shape(_in(1)), _out),
    "Conv3D": _convolution(_shape(_in(1)), _out),
    "Conv2DBackpropInput": _convolution(_shape(_in(1)), _in(2)),
    "Conv2DBackpropFilter": _convolution(_shape(_out), _in(2)),
    "DepthwiseConv2dNative": _convolution(_shape(_in(1)), _out),
    "DepthwiseConv2dNativeBackpropInput": _convolution(_shape(_in(1)), _in(2)),
    "DepthwiseConv2dNativeBackpropFilter": _convolution(_shape(_out), _in(2)),
}
