"""The sizes of a step's tensors, where ``fit`` traces the step without the batch's size.

For an unknown size TensorFlow makes other operations than for a known one, so a plan has to be made
for the operations that ``fit`` traces. Their sizes come from a copy of the graph whose placeholders
have the known shapes: TensorFlow infers all other shapes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef

from tfscale.training.recompute.watch import Forward

Traced = tuple[Forward, list[Any], Sequence[tf.Operation]]


def with_sizes(
    forward: Forward, gradients: Sequence[Any], shapes: Mapping[str, tf.TensorShape]
) -> Traced | None:
    """Return a copy of a forward pass, its gradients and all operations, with known shapes.

    A graph that calls functions, such as the bodies of loops, is not copied: its functions would
    be defined twice. The result is None then.

    Args:
        forward: the forward pass.
        gradients: its gradients; None for variables without one.
        shapes: the known shapes of placeholders, by name.
    """
    definition = forward.graph.as_graph_def(add_shapes=True)
    if definition.library.function or not _give(definition, shapes):
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
    operations = [copy.get_operation_by_name(one.name) for one in forward.graph.get_operations()]
    return Forward(copy, forward.device, forward.events), own, operations


def _give(definition: GraphDef, shapes: Mapping[str, tf.TensorShape]) -> bool:
    """Give placeholders their shapes; return whether all of them are there."""
    found = [node for node in definition.node if node.name in shapes]
    for node in found:
        shape = shapes[node.name].as_proto()
        node.attr["shape"].shape.CopyFrom(shape)
        node.attr["_output_shapes"].list.shape[0].CopyFrom(shape)
    return len(found) == len(shapes)
