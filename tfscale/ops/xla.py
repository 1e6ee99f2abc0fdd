"""Finds out whether XLA compiles a step: XLA cannot call our ops."""

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext


def compiles_this() -> bool:
    """Whether XLA will compile what is being traced; eagerly, never."""
    if tf.executing_eagerly():
        return False
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
