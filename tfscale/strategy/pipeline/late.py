"""Gradients of weights that a backward pass computes later than those of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.graphs import behind, has_state, number_of, wait_for
from tfscale.exchange.rows import numbers_of


def put_off(
    gradients: Sequence[Any], needed: Sequence[tf.Tensor], begin: int, after: Sequence[tf.Tensor]
) -> None:
    """Let the operations that only some gradients need run after other tensors are there.

    A collective among these operations leaves them all as they are: TensorFlow orders collectives
    as they are traced, so those that are traced between a backward pass and its late gradients
    would wait for them.

    Args:
        gradients: gradients, dense, of rows or None.
        needed: what others need at once of the same backward pass.
        begin: number of the backward pass's first operation.
        after: the tensors; no operation of these needs the gradients.
    """
    tensors = [numbers_of(g) for g in gradients if g is not None]
    tensors += [g.indices for g in gradients if isinstance(g, tf.IndexedSlices)]
    own = _made_by(tensors, begin) - _made_by(needed, begin)
    if any(has_state(op.type) for op in own):
        return
    gates = [behind(x, f"{x.op.name}/gate").op for x in after]
    for op in own:
        if any(x.op not in own for x in op.inputs):
            for gate in gates:
                wait_for(op, gate)


def _made_by(tensors: Sequence[tf.Tensor], begin: int) -> set[tf.Operation]:
    """Return the operations of the backward pass that some tensors need."""
    found: set[tf.Operation] = set()
    todo = [x.op for x in tensors]
    while todo:
        op = todo.pop()
        if op not in found and number_of(op) >= begin:
            found.add(op)
            todo += [x.op for x in op.inputs]
    return found
