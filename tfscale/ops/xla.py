"""Check whether XLA compiles a step, since XLA cannot call our ops."""

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext


def compiles_this() -> bool:
    """Return whether XLA will compile the function that is being traced; False in eager mode."""
    if tf.executing_eagerly():
        return False
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
