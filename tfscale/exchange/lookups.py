"""Lookups of a table's rows, and whether they are the same for all samples.

One device looks up a transformer's positions once for a whole batch; k replicas do so k times,
once each. Optimizers that square a sparse gradient row by row see the difference, unless replicas
add up these rows instead of joining them. Rows that are looked up by the data are joined: one
device, too, has one for each sample.

``tf.nn.embedding_lookup_sparse``, and a ``Dense`` layer of a sparse input, look up each row once,
however many samples ask for it. So one device has one row of a gradient where k replicas may have
k, which have to be added.
"""

from __future__ import annotations

import tensorflow as tf

from tfscale.exchange import dataflow

# Which result of an operation holds each row once.
_UNIQUE = {
    **{"Unique": 0, "UniqueV2": 0},
    **{f"SparseSegment{kind}GradV2": 1 for kind in ("Sum", "Mean", "SqrtN")},
}


def are_of_all_samples(indices: tf.Tensor) -> bool:
    """Whether indices do not depend on the data of a step, and so are the same on every replica.

    This can be seen only in a graph, and if the number of indices is known; otherwise the answer
    is False.
    """
    if tf.executing_eagerly() or indices.shape.num_elements() is None:
        return False
    (depends,) = dataflow.gathered([indices], _comes_with_data)
    return not depends


def are_unique(indices: tf.Tensor) -> bool:
    """Return whether each replica looks up a row at most once.

    This can be seen only in a graph; otherwise the answer is False.
    """
    if tf.executing_eagerly():
        return False
    while indices.op.type in ("Identity", "Cast", "Reshape"):
        indices = indices.op.inputs[0]
    return bool(indices.value_index == _UNIQUE.get(indices.op.type))


def _comes_with_data(op: tf.Operation) -> int:
    """A batch, whatever is drawn at random, and whatever else differs from step to step."""
    if op.type == "Placeholder":
        return int(not dataflow.is_captured(op))
    if "Random" in op.type:
        return 1
    return int(op.op_def.is_stateful and op.type not in ("ReadVariableOp", "VarHandleOp"))
