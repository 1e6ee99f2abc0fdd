"""The sizes of a step's tensors, where ``fit`` traces the step without the batch's size.

For an unknown size TensorFlow makes other operations than for a known one, so a plan has to be made
for the operations that ``fit`` traces. Their sizes come from a copy of the graph in which the batch
has the known shapes: TensorFlow infers all other shapes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef

from tfscale.bridge.graphs import contents_of_handle
from tfscale.training.recompute.watch import Forward

Output = tuple[str, int]  # an operation, and the position of its output

Traced = tuple[Forward, list[Any], Sequence[tf.Operation]]


def with_sizes(
    forward: Forward, gradients: Sequence[Any], shapes: Mapping[Output, tf.TensorShape]
) -> Traced | None:
    """Return a copy of a forward pass, its gradients and all operations, with known shapes.

    The shapes of the elements of lists, which loops make, are not inferred again. So a graph with
    such a list is not copied, and the result is None.

    Args:
        forward: the forward pass.
        gradients: its gradients; None for variables without one.
        shapes: the known shapes of tensors, by operation and position.
    """
    originals = forward.graph.get_operations()
    if any(_is_list(tensor) for one in originals for tensor in one.outputs):
        return None
    definition = forward.graph.as_graph_def(add_shapes=True)
    if not _give(definition, shapes):
        return None
    copy = tf.Graph()
    with copy.as_default():
        tf.graph_util.import_graph_def(definition, name="")

    def copied(tensor: Any) -> Any:
        return copy.get_operation_by_name(tensor.op.name).outputs[tensor.value_index]

    own = [
        None if one is None else tf.nest.map_structure(copied, one, expand_composites=True)
        for one in gradients
    ]
    operations = [copy.get_operation_by_name(one.name) for one in originals]
    return replace(forward, graph=copy), own, operations


def _is_list(tensor: Any) -> bool:
    return tensor.dtype == tf.variant and bool(contents_of_handle(tensor))


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
