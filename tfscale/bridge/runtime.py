"""The runtime of TensorFlow in this process: its context, its cluster, what XLA compiles."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf
from tensorflow.python.distribute.multi_worker_util import coordination_leader
from tensorflow.python.eager.context import context
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

__all__ = ["context", "coordination_leader", "is_compiled_by_xla", "let_overlap"]


def is_compiled_by_xla() -> bool:
    """Whether XLA will compile what is being traced; eagerly, never."""
    if tf.executing_eagerly():
        return False
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def let_overlap(kinds: Iterable[str]) -> None:
    """Take operations out of TensorFlow's automatic ordering of operations on one resource.

    Args:
        kinds: names of the operations' types.
    """
    for kind in kinds:
        auto_control_deps_utils.register_read_only_resource_op(kind)
