"""The runtime of TensorFlow in this process: its context, its cluster, what XLA compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import tensorflow as tf
from tensorflow.python.distribute.multi_worker_util import coordination_leader
from tensorflow.python.eager.context import context
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.framework.auto_control_deps import op_is_stateful
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

_INDEPENDENT = "_independent_side_effects"  # attribute of what TensorFlow leaves unordered
_READ_TABLES = ("LookupTableFindV2", "LookupTableSizeV2", "LookupTableExportV2")


def is_compiled_by_xla() -> bool:
    """Whether XLA will compile what is being traced; eagerly, never."""
    if tf.executing_eagerly():
        return False
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def moment() -> tf.Tensor:
    """Return the moment at which a step is here, in seconds.

    TensorFlow runs operations that change the world, or depend on it, in the order of the program:
    a replica of this process would then ask for the time only after another one has ended its step.
    """
    now = tf.timestamp()
    if not tf.executing_eagerly():
        order = tf.compat.v1.get_default_graph().experimental_acd_manager
        if order is not None:
            order.run_independently(now.op)
    return now


@contextlib.contextmanager
def ordered_by_device() -> Iterator[None]:
    """Let side effects that are traced in a block wait for earlier ones on their device only.

    TensorFlow runs operations such as assertions, prints and calls of Python in the order in which
    they were made, on all devices together. Replicas are traced one after the other: the first
    assertion of one would wait for the last assertion of the one before, which may wait for a sum
    that both take part in. The same holds for reads of a lookup table, which replicas share:
    TensorFlow knows only of reads of variables that they may overlap.
    """
    let_overlap(_READ_TABLES)
    graph = tf.compat.v1.get_default_graph()
    order = None if tf.executing_eagerly() else graph.experimental_acd_manager
    first = len(graph.get_operations()) if order is not None else 0
    yield
    if order is None:
        return
    last: dict[str, tf.Operation] = {}
    for operation in filter(_has_side_effects, graph.get_operations()[first:]):
        if operation.device in last:
            operation._add_control_input(last[operation.device])
        last[operation.device] = operation
        order.run_independently(operation)


def _has_side_effects(operation: tf.Operation) -> bool:
    """Whether TensorFlow orders an operation behind all others that change no known resource."""
    return (
        op_is_stateful(operation)
        and all(x.dtype != tf.resource for x in operation.inputs)
        and _INDEPENDENT not in operation.node_def.attr
    )


def let_overlap(kinds: Iterable[str]) -> None:
    """Take operations out of TensorFlow's automatic ordering of operations on one resource.

    Args:
        kinds: names of the operations' types.
    """
    for kind in kinds:
        auto_control_deps_utils.register_read_only_resource_op(kind)
