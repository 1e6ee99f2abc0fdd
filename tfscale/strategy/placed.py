"""Variables of which each replica holds a part: shards of slots, and weights that grids cut.

To Keras they are whole: from outside of replicas they read and assign the whole variable.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import native, path_of
from tfscale.bridge.tensorflow import is_saving_non_distributed, own_copy
from tfscale.exchange.slots import Slot
from tfscale.parallel.layout import Flat, Layout
from tfscale.strategy.step import on_a_replica
from tfscale.strategy.variables import OfKeras

_TAPE = (
    "a tape computes the gradient of {path} outside of a step, and each replica holds a part of "
    "this variable. Let a train_step of the model compute it; or save the model, load it without a "
    "strategy, and differentiate that one"
)
_NOT_IN_A_FUNCTION = (
    "{path} is held in parts by several replicas, and a function that is traced outside of the "
    "strategy's scope reads it, as export does. Call the model without tf.function, or predict. To "
    "export it, save it as a .keras file, load the file without a strategy, and export that model"
)


@dataclasses.dataclass
class Placement:
    """Description of a new variable of which each replica holds a part.

    Attributes:
        layout: who holds what.
        fill: function that makes a part of this shape and type, if all numbers begin equal; None if
            the whole initial value must be made and cut.
        first: the whole initial value, once it has been made.
        kind: class of the variable; None for ``Placed``.
        team: team of the replicas that hold one whole variable; None for all replicas.
    """

    layout: Layout
    fill: Callable[[tuple[int, ...], tf.DType], Any] | None = None
    first: Any = None
    kind: type[Placed] | None = None
    team: Any = None


_placement: contextvars.ContextVar[Placement | None] = contextvars.ContextVar(
    "placement", default=None
)


@contextlib.contextmanager
def placing(placement: Placement | None) -> Iterator[None]:
    """Make all variables in this block so that each replica holds its part, unless it is None."""
    token = _placement.set(placement)
    try:
        yield
    finally:
        _placement.reset(token)


def placed_now() -> Placement | None:
    """Return how the variable is made that is made now; None if each replica holds all of it."""
    return _placement.get()


class Placed(OfKeras):
    """Variable of which each replica holds a part; from outside, it reads and assigns the whole.

    A replica may assign its part, or the whole variable, of which it then keeps its part.

    Attributes:
        layout: who holds what.
        team: team of the replicas that hold one whole variable; None for all replicas.
        keras_path: path of Keras's variable.
    """

    layout: Layout
    team: Any = None
    keras_path: str = ""

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the whole variable; on a replica, of its part."""
        return own_copy(self).shape if on_a_replica() else tf.TensorShape(self.layout.shape)

    @property
    def handle(self) -> Any:
        """Handle of this replica's part; a tape reads it when it computes a gradient."""
        if tf.executing_eagerly() and not on_a_replica():
            raise ValueError(_TAPE.format(path=self.keras_path or self.name))
        return super().handle

    def value(self) -> tf.Tensor:
        """Return a replica's part, or the whole outside of replicas; TensorFlow calls this."""
        return tf.convert_to_tensor(self._get())

    def _get(self) -> Any:
        if tf.distribute.has_strategy() and not is_saving_non_distributed():
            return super()._get()
        # Outside of the scope, TensorFlow would take the first replica's part for the whole.
        if not tf.executing_eagerly():
            raise ValueError(_NOT_IN_A_FUNCTION.format(path=self.keras_path or self.name))
        return self.read_value()  # enters the scope

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        """Return the part of one replica of this process."""
        rank = self.distribute_strategy.extended.first_rank + local_id
        return self.layout.part(whole, rank)

    def assign_whole(self, local_id: int, whole: tf.Tensor) -> Any:
        """Assign the part of one replica of this process, from a whole value."""
        return self.values[local_id].assign(self.of_replica(local_id, whole))

    def _get_cross_replica(self) -> tf.Tensor:
        extended = self.distribute_strategy.extended
        parts = [v.read_value() for v in self.values]
        return extended.whole(self.layout, parts, f"the parts of {self.keras_path}")

    def _update_cross_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        whole, done = tf.convert_to_tensor(value, self.dtype), []
        for i, own in enumerate(self.values):
            with tf.device(own.device):
                done.append(update_fn(own, self.of_replica(i, whole), **kwargs))
        return self if tf.executing_eagerly() else tf.group(*done)

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        own, shape = own_copy(self), self.layout.shape
        if not isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value, self.dtype)
            if value.shape == shape != own.shape:
                local = [v is own for v in self.values].index(True)
                value = self.of_replica(local, value)
        return update_fn(own, value, **kwargs)


class OwnedCopy(Placed):
    """Slot with room on each replica, of which only the owner's copy is kept up to date."""

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        """Return the whole value: all replicas have room for it."""
        return whole


class WorkingPart(Placed):
    """Part of a weight that a replica holds; an optimizer updates it in place of the weight.

    The optimizer takes it for the weight: it has the weight's path and its place.
    """

    weight: Any

    @property
    def _unique_id(self) -> str:
        return str(native(self.weight)._unique_id)

    @property
    def path(self) -> str:
        """Path of the weight."""
        return path_of(self.weight)


def assign_part(assign: Any, slot: Any, value: Any) -> Any:
    """Assign a Keras variable; on a replica, its part, whose shape is not the variable's shape."""
    if not on_a_replica():
        return assign(slot, value)
    slot.value.assign(tf.cast(value, slot.value.dtype))
    return value


class WholeView:
    """A placed variable as functions see it that update variables outside of replicas.

    It reads as the whole variable; assigning the whole variable assigns one replica's part.

    Args:
        variable: the variable.
        local_id: number of the replica in this process.
        whole: value of the variable.
    """

    def __init__(self, variable: Placed, local_id: int, whole: tf.Tensor) -> None:
        self._variable, self._local_id, self._whole = variable, local_id, whole
        self.dtype, self.shape = whole.dtype, whole.shape

    def assign(self, value: Any) -> Any:
        """Assign the replica's part of a whole value."""
        self._whole = tf.convert_to_tensor(value, self.dtype)
        return self._variable.assign_whole(self._local_id, self._whole)

    def assign_add(self, value: Any) -> Any:
        """Add a whole value."""
        return self.assign(self._whole + tf.convert_to_tensor(value, self.dtype))

    def assign_sub(self, value: Any) -> Any:
        """Subtract a whole value."""
        return self.assign(self._whole - tf.convert_to_tensor(value, self.dtype))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._whole, dtype, name=name)

    def __add__(self, other: Any) -> tf.Tensor:
        return self._whole + tf.convert_to_tensor(other, self.dtype)

    def __sub__(self, other: Any) -> tf.Tensor:
        return self._whole - tf.convert_to_tensor(other, self.dtype)

    def __mul__(self, other: Any) -> tf.Tensor:
        return self._whole * tf.convert_to_tensor(other, self.dtype)


class Shard(Placed):
    """Slot of tfscale of which each replica holds a shard.

    Attributes:
        slot: the slot, which tells the shape of the whole tensor, and perhaps a weight that the
            tensor equals.
    """

    slot: Slot

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """Equal parts of the slot."""
        return Flat(self.slot.shape, self.distribute_strategy.extended.number_of_replicas)

    def _get_cross_replica(self) -> tf.Tensor:
        weight = self.slot.equals
        if weight is not None and not self.distribute_strategy.rounds.is_apart(weight):
            return tf.cast(weight.values[0].read_value(), self.dtype)
        return super()._get_cross_replica()
