"""Lookups of a table's rows, and whether they are the same for all samples.

A single device looks up a transformer's positions once for a whole batch; k replicas look them up
k times, once each. The results differ for optimizers that square a sparse gradient row by row. So
replicas add up these rows instead of joining them. Replicas join the rows that depend on the data:
a single device, too, has one such row for each sample.

``tf.nn.embedding_lookup_sparse``, and a ``Dense`` layer of a sparse input, look up each row once,
however many samples use the row. So a single device has one row of a gradient where k replicas may
have k rows, which must be added.
"""

from __future__ import annotations

import tensorflow as tf

from tfscale.exchange import dataflow

# The index of the result that holds each row once, by the operation's type.
_UNIQUE = {
    **{"Unique": 0, "UniqueV2": 0},
    **{f"SparseSegment{kind}GradV2": 1 for kind in ("Sum", "Mean", "SqrtN")},
}


def are_of_all_samples(indices: tf.Tensor) -> bool:
    """Return whether indices are equal on all replicas, as they do not depend on a step's data.

    Only a graph with a known number of indices shows this; otherwise the answer is False.
    """
    if tf.executing_eagerly() or indices.shape.num_elements() is None:
        return False
    (depends,) = dataflow.gathered([indices], _comes_with_data)
    return not depends


def are_unique(indices: tf.Tensor) -> bool:
    """Return whether each replica looks up a row at most once.

    Only a graph shows this; otherwise the answer is False.
    """
    if tf.executing_eagerly():
        return False
    while indices.op.type in ("Identity", "Cast", "Reshape"):
        indices = indices.op.inputs[0]
    return bool(indices.value_index == _UNIQUE.get(indices.op.type))


def _comes_with_data(op: tf.Operation) -> int:
    """Return 1 if an operation's result may differ from step to step, else 0.

    Batches differ, and so do results of random and of stateful operations, except for variables.
    """
    if op.type == "Placeholder":
        return int(not dataflow.is_captured(op))
    if "Random" in op.type:
        return 1
    return int(op.op_def.is_stateful and op.type not in ("ReadVariableOp", "VarHandleOp"))
