"""The sizes of a step's tensors, where ``fit`` traces the step without the batch's size.

For an unknown size TensorFlow makes other operations than for a known one, so a plan has to be made
for the operations that ``fit`` traces. Their sizes come from a copy of the graph in which the batch
has the known shapes: TensorFlow infers all other shapes again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef

from tfscale.bridge.graphs import contents_of_handle, give_contents
from tfscale.training.recompute.watch import Forward

Output = tuple[str, int]  # an operation, and the position of its output

Traced = tuple[Forward, list[Any], Sequence[tf.Operation]]


# When a graph is copied, TensorFlow does not infer the shapes of their results again.
_LOOPS_AND_LISTS = frozenset(
    {"StatelessWhile", "TensorListGetItem", "TensorListPopBack", "TensorListStack", "While"}
)


def with_sizes(
    forward: Forward, gradients: Sequence[Any], shapes: Mapping[Output, tf.TensorShape]
) -> Traced | None:
    """Return a copy of a forward pass, its gradients and all operations, with known shapes.

    TensorFlow infers no shapes of what loops return, and of the lists that they fill. Unknown
    lengths there are taken for the batch's: compare the memory with that of a step for a known
    size. If the batch has several unknown lengths that differ, the result is None.

    Args:
        forward: the forward pass.
        gradients: its gradients; None for variables without one.
        shapes: the known shapes of tensors, by operation and position.
    """
    originals = forward.graph.get_operations()
    length = _unknown_length(forward.graph, shapes)
    if length is None and has_lists(originals):
        return None
    definition = forward.graph.as_graph_def(add_shapes=True)
    if not _give(definition, shapes):
        return None
    _fill_loops(definition, length)
    copy = tf.Graph()
    with copy.as_default():
        tf.graph_util.import_graph_def(definition, name="")

    def copied(tensor: Any) -> Any:
        return copy.get_operation_by_name(tensor.op.name).outputs[tensor.value_index]

    for tensor in _lists(originals):
        contents = deepcopy(contents_of_handle(tensor))
        for each in contents:
            _fill(each.shape, length)
        give_contents(copied(tensor), contents)
    own = [
        None if one is None else tf.nest.map_structure(copied, one, expand_composites=True)
        for one in gradients
    ]
    operations = [copy.get_operation_by_name(one.name) for one in originals]
    return replace(forward, graph=copy), own, operations


def has_lists(operations: Sequence[tf.Operation]) -> bool:
    """Return whether operations make lists, as loops do."""
    return next(_lists(operations), None) is not None


def _lists(operations: Sequence[tf.Operation]) -> Iterator[Any]:
    for one in operations:
        for tensor in one.outputs:
            if tensor.dtype == tf.variant and contents_of_handle(tensor):
                yield tensor


def _unknown_length(graph: tf.Graph, shapes: Mapping[Output, tf.TensorShape]) -> int | None:
    """Return the batch's length, if that is the only one that the graph does not know."""
    found = {
        length
        for (name, position), shape in shapes.items()
        for before, length in zip(graph.get_operation_by_name(name).outputs[position].shape, shape)
        if before is None
    }
    return found.pop() if len(found) == 1 else None


def _fill_loops(definition: GraphDef, length: int | None) -> None:
    for node in definition.node:
        if node.op in _LOOPS_AND_LISTS:
            for attribute in {"_output_shapes", "output_shapes"} & node.attr.keys():
                for shape in node.attr[attribute].list.shape:
                    _fill(shape, length)


def _fill(shape: Any, length: int | None) -> None:
    for each in shape.dim:
        if each.size < 0 and length is not None:
            each.size = length


def _give(definition: GraphDef, shapes: Mapping[Output, tf.TensorShape]) -> bool:
    """Give tensors their shapes; return whether all of them are there."""
    nodes = {node.name: node for node in definition.node}
    for (name, position), shape in shapes.items():
        if name not in nodes:
            return False
        attributes = nodes[name].attr
        if nodes[name].op == "Placeholder":
            attributes["shape"].shape.CopyFrom(shape.as_proto())
        attributes["_output_shapes"].list.shape[position].CopyFrom(shape.as_proto())
    return bool(shapes)
