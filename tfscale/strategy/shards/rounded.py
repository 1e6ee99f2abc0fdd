"""Weights that replicas send each other rounded, beside parts of their exact values.

Replicas compute with copies that are rounded alike. The exact value is in the working parts, one on
each replica, which the optimizer updates. So no update is lost in rounding, however small it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import native
from tfscale.bridge.protocols import Variable
from tfscale.bridge.tensorflow import become, own_copy, read_from_outside
from tfscale.collectives.wires import LOSSLESS
from tfscale.compression.policy import MethodPolicy
from tfscale.exchange.packing import describe
from tfscale.parallel.layout import Copy, Layout
from tfscale.strategy.placed import Placed, WorkingPart
from tfscale.strategy.step import on_a_replica

_ASSIGNED = (
    "a step assigns {path}, by itself or by a constraint that was set after the optimizer was "
    "built, as the callback Prune does. Each replica holds only a part of the exact value, because "
    "weights_wire sends the weight rounded. Give the weight its constraint when it is made, assign "
    "it in a callback, or let it travel exactly: weights_wire={{{path!r}: 'fp32', '*': 'bf16'}}"
)
_OTHER_PARTS = (
    "two optimizers train {path} and share its exact value out differently, which weights_wire "
    "does not support. Give both the same list of weights, or leave weights_wire out"
)


class Rounded(Placed):
    """Weight of which each replica has a rounded copy and a part of the exact value.

    What computes with it gets the copy. It reads outside of replicas, is saved and is assigned as
    the exact value.

    Attributes:
        exact: the exact value.
        begins_later: whether the weight had no numbers when it became rounded: TensorFlow fills
            what a traced step makes after the trace.
    """

    exact: WorkingPart
    begins_later = False

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """A copy on each rank."""
        return Copy(tuple(self.values[0].shape), self.exact.layout.ranks)

    def _get(self) -> Any:
        return own_copy(self)

    def read_value(self) -> tf.Tensor:
        """Return the exact value outside of replicas, else the copy; TensorFlow calls this."""
        if on_a_replica() or not tf.executing_eagerly():
            return tf.identity(self._get())
        return self.exact.read_value()  # enters the scope

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        """Return a replica's copy of an exact value."""
        return tf.cast(tf.cast(whole, tf.bfloat16), whole.dtype)

    def assign_whole(self, local_id: int, whole: tf.Tensor) -> Any:
        """Assign one replica's copy, and its part of the exact value."""
        self.exact.assign_whole(local_id, whole)
        return super().assign_whole(local_id, whole)

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Add to the exact value."""
        return self.assign(self.read_value() + tf.convert_to_tensor(value, self.dtype))

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Subtract from the exact value."""
        return self.assign(self.read_value() - tf.convert_to_tensor(value, self.dtype))

    def _get_cross_replica(self) -> tf.Tensor:
        return read_from_outside(self.exact)

    def _update_cross_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        self.exact._update_cross_replica(update_fn, value, **kwargs)
        return super()._update_cross_replica(update_fn, value, **kwargs)

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        raise ValueError(_ASSIGNED.format(path=self.exact.path))


def rounding(policy: MethodPolicy, variables: Sequence[Variable]) -> MethodPolicy:
    """Return the wires of these weights: some stay exact, whatever the policy says.

    A constraint needs the whole exact weight, and wires for float32 would round other types more.
    """
    kept = [
        describe(v).path
        for v in variables
        if getattr(v, "constraint", None) or tf.as_dtype(v.dtype) != tf.float32
    ]
    return policy.keeping(kept) if kept else policy


def exact_part(
    weight: Variable, layout: Layout, policy: MethodPolicy, make: Callable[..., WorkingPart]
) -> WorkingPart:
    """Return the working part of a weight; a weight that travels rounded becomes ``Rounded``.

    Args:
        weight: the weight.
        layout: which part of it each replica updates.
        policy: the wires of weights.
        make: function of a weight and a layout that makes a working part.
    """
    own = native(weight)
    if isinstance(own, Rounded) and own.exact.layout == layout:
        return own.exact  # of another optimizer
    working = make(weight, layout)
    if policy.method_of(describe(weight)).wires == (LOSSLESS,):
        return working
    with tf.init_scope():
        if not all(v.is_initialized() for v in own.values):
            own = become(own, Rounded)
            own.exact, own.begins_later = working, True
            return working
        wholes = [v.read_value() for v in own.values]
        if isinstance(own, Rounded):
            wholes = [own.read_value()] * len(own.values)
        own = become(own, Rounded)
        own.exact = working
        for i, whole in enumerate(wholes):
            own.assign_whole(i, whole)
    return working


def is_exact_part(working: WorkingPart) -> bool:
    """Return whether a working part is a part of the only exact value of its weight."""
    own = native(working.weight)
    return isinstance(own, Rounded) and own.exact is working


def begin(working: WorkingPart, held: tf.Tensor) -> None:
    """Give a part of an exact value its first numbers, if it had none when it was made.

    A number that the copy does not equal, once it is rounded, comes from the copy.

    Args:
        working: this replica's part of the exact value.
        held: part of the replica's copy, of the same numbers.
    """
    own = native(working.weight)
    if own.begins_later:
        exact = own_copy(working).read_value()
        working.assign(tf.where(own.of_replica(0, exact) == held, exact, held))


def refuse_other_parts(working: WorkingPart) -> None:
    """Raise if the exact value of the weight is shared out otherwise."""
    if isinstance(native(working.weight), Rounded) and not is_exact_part(working):
        raise ValueError(_OTHER_PARTS.format(path=working.path))
