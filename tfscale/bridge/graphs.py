"""Private parts of TensorFlow's graphs: functions, inputs, attributes, handles of variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops.handle_data_util import get_resource_handle_data

KEPT = "_grappler_do_not_remove"  # attribute of an operation that no optimization removes
COLOCATED = "_class"  # attribute that names the operations on whose device one must be


def function_in(graph: tf.Graph, name: str) -> Any:
    """Return a function of a graph by its name."""
    return graph._get_function(name)


def replace_input(operation: tf.Operation, position: int, tensor: tf.Tensor) -> None:
    """Give an operation another input."""
    operation._update_input(position, tensor)


def has_state(kind: str) -> bool:
    """Whether TensorFlow counts operations of a type as stateful."""
    return bool(op_def_registry.get(kind).is_stateful)


def contents_of_handle(tensor: tf.Tensor) -> Sequence[Any]:
    """Return the shapes and types of the tensors behind a handle."""
    return get_resource_handle_data(tensor).shape_and_type  # type: ignore[no-any-return]


def of_first_replica(spec: Any) -> Any:
    """Return the first replica's specification, if there are several replicas."""
    return getattr(spec, "_value_specs", [spec])[0]
