"""Private parts of TensorFlow's graphs: functions, inputs, attributes, handles of variables."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.cpp_shape_inference_pb2 import CppShapeInferenceResult
from tensorflow.python.ops.handle_data_util import get_resource_handle_data, set_handle_data

_KEPT = "_grappler_do_not_remove"  # attribute of an operation that no optimization removes
_COLOCATED = "_class"  # attribute that names the operations on whose device one must be


def function_in(graph: tf.Graph, name: str) -> Any:
    """Return a function of a graph by its name."""
    return graph._get_function(name)


def replace_input(operation: tf.Operation, position: int, tensor: tf.Tensor) -> None:
    """Give an operation another input."""
    operation._update_input(position, tensor)


def wait_for(operation: tf.Operation, other: tf.Operation) -> None:
    """Let an operation run only after another one, which was made later."""
    operation._add_control_input(other)


def behind(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Pass a tensor through an operation that costs nothing and that no optimization removes.

    TensorFlow still knows the tensor's shape. It does not rewrite operations that others wait for,
    so others should wait for this operation instead of the tensor's own. A read of a variable has
    no device of its own; then the operation gets that of the context.
    """
    device = tensor.op.device
    with tf.device(device) if device else contextlib.nullcontext():
        passing = tensor.graph.create_op(
            "PreventGradient",
            [tensor],
            [tensor.dtype],
            name=name,
            attrs={"T": AttrValue(type=tensor.dtype.as_datatype_enum), _KEPT: AttrValue(b=True)},
        )
    return passing.outputs[0]


def after(operations: Sequence[tf.Operation], name: str) -> tf.Operation:
    """Return an operation of the current graph that runs when others have run.

    TensorFlow lets an operation no longer wait for another one if it has to wait for that anyway,
    by way of others, and may then fuse or merge it. So a new operation must open no new ways.
    TensorFlow follows no way through a Merge, which usually waits for only one of its inputs. Here
    the Merge has a single input. A function makes each Merge wait for all operations before it that
    have effects, unless the Merge is said to run independently.
    """
    with tf.control_dependencies(None), tf.control_dependencies(operations):
        done = tf.constant(0, name=name)
    with tf.control_dependencies(None):
        merge = tf.raw_ops.Merge(inputs=[done], name=f"{name}/open").output.op
    dependencies = merge.graph.experimental_acd_manager
    if dependencies is not None:
        dependencies.run_independently(merge)
    return merge


def another(original: tf.Operation, inputs: Sequence[Any], name: str) -> tf.Operation:
    """Return a copy of an operation with other inputs."""
    attributes = {k: value for k, value in original.node_def.attr.items() if k != _COLOCATED}
    with tf.device(original.device or None):
        return original.graph.create_op(
            original.type,
            inputs,
            [tensor.dtype for tensor in original.outputs],
            name=name,
            attrs=attributes,
        )


def shaped_like(tensor: tf.Tensor, other: tf.Tensor, name: str) -> tf.Tensor:
    """Return a tensor of which TensorFlow knows that it has another one's shape.

    TensorFlow copies nothing, since both have the same shape. A Reshape would not do: if two shapes
    have one unknown length each, TensorFlow believes that reshaping leaves this length as it was.
    """
    with tf.device(tensor.op.device or None):
        shaped = tf.broadcast_to(tensor, tf.shape(other, name=f"{name}/shape"), name=name)
    shaped.set_shape(other.shape)
    return shaped


def number_of(operation: tf.Operation) -> int:
    """Return the number of an operation in its graph: operations that are made later have more."""
    return int(operation._id)


def next_number(graph: tf.Graph) -> int:
    """Return a number that the next operation of a graph has, or exceeds."""
    made = graph.get_operations()
    return number_of(made[-1]) + 1 if made else 0


def has_state(kind: str) -> bool:
    """Whether operations of a type may have state; a type may be the name of a function, too."""
    definition = op_def_registry.get(kind)
    return definition is None or bool(definition.is_stateful)


def contents_of_handle(tensor: tf.Tensor) -> Sequence[Any]:
    """Return the shapes and types of the tensors behind a handle."""
    return get_resource_handle_data(tensor).shape_and_type  # type: ignore[no-any-return]


def give_contents(tensor: tf.Tensor, contents: Sequence[Any]) -> None:
    """Give a handle the shapes and types of the tensors behind it."""
    data = CppShapeInferenceResult.HandleData(is_set=True, shape_and_type=contents)
    set_handle_data(tensor, data)


def of_first_replica(spec: Any) -> Any:
    """Return the first replica's specification, if there are several replicas."""
    return getattr(spec, "_value_specs", [spec])[0]
