"""The runtime of TensorFlow in this process: its context, its cluster, what XLA compiles."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf
from tensorflow.python.distribute.multi_worker_util import coordination_leader
from tensorflow.python.eager.context import context
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

__all__ = ["context", "coordination_leader", "is_compiled_by_xla", "let_overlap", "moment"]


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


def let_overlap(kinds: Iterable[str]) -> None:
    """Take operations out of TensorFlow's automatic ordering of operations on one resource.

    Args:
        kinds: names of the operations' types.
    """
    for kind in kinds:
        auto_control_deps_utils.register_read_only_resource_op(kind)
