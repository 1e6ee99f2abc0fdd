"""Variables of which every replica holds a copy.

Weights are the same on all replicas because their updates are the same. Four kinds of variables
differ: seeds, statistics, counts of metrics, and accumulated gradients. If replicas agree only once
in many steps, each replica also has its own weights, statistics and values of optimizers in
between: ``LocalWeight``.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.bridge.layers import variable_being_made
from tfscale.bridge.objects import (
    ACCUMULATOR,
    LAYER_SEED,
    RNN_STATE,
    kind_of_keras,
    native,
    path_of,
)
from tfscale.bridge.tensorflow import (
    DistributedValues,
    DistributedVariable,
    MirroredVariable,
    PerReplica,
    SaveableObject,
    SaveSpec,
    SyncOnReadVariable,
    assign_on_device,
    first_copy,
    is_saving_non_distributed,
    own_copy,
    read_from_outside,
    regroup,
    variables_of,
)
from tfscale.exchange import dataflow
from tfscale.exchange.slots import COMMON, IN_SHARDS, ON_EACH, Slot, created_now
from tfscale.parallel.layout import Flat, Layout
from tfscale.strategy import origin
from tfscale.strategy.step import on_a_replica, this_step

_VALUE = "VARIABLE_VALUE"  # name of a value in TensorFlow's checkpoints

# Difference between the seeds of two replicas, in the first word of a generator's state: so large
# that no two replicas ever draw the same numbers.
_FOLD = 0x9E3779B1

_NOT_IN_A_FUNCTION = (
    "{path} is held in parts by several replicas, and a function that is traced outside of the "
    "strategy's scope reads it, as export does. Call the model without tf.function, or predict. To "
    "export it, save it as a .keras file, load the file without a strategy, and export that model"
)
_SUMMED = (
    'the variable {!r} has aggregation="sum", which sums each assignment over replicas, but in '
    "rounds replicas train alone. Leave out aggregation, and tfscale averages the variable at the "
    "end of each round; or use sync=tfscale.sync.EveryStep()"
)


_OTHERS_WOULD_NOT_FOLLOW = (
    "update_step() assigns {!r}, which is neither the weight nor one of its slots. In a pipeline, "
    "and with shard='optimizer', some replicas update a weight, and the others would not follow. "
    "Make a slot of each weight with self.add_variable_from_reference(weight, name=...), assign "
    "common state outside of update_step(), or leave pipeline and shard out"
)


class Observer:
    """Object that knows whether replicas have different values of a weight, and is told of changes.

    This one knows of no differences.
    """

    def as_seen(self, variable: Weight) -> Any:
        """Return what a weight reads as outside of replicas; None if all have the same value."""
        return None

    def is_apart(self, variable: Weight) -> bool:
        """Return whether replicas may have different values of a weight."""
        return False

    def assigned(self, variable: Weight) -> None:
        """Note that a weight has been assigned outside of replicas."""


class _Readable:
    """Conversions of a variable to a number or an array, for learning rates and metrics."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.numpy())  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.numpy())  # type: ignore[attr-defined]


class Weight(_Readable, MirroredVariable):
    """Variable whose updates are the same on all replicas if gradients are the same.

    A value that a replica assigns by itself, computed from its samples, is averaged as statistics
    are.
    """

    @property
    def handle(self) -> Any:
        """Handle of this replica's copy; a tape reads it when it computes a gradient."""
        try:
            return super().handle
        except ValueError as error:
            raise ValueError(
                f"a tape computes the gradient of {self.name} outside of strategy.run, but this "
                f"variable has a copy on each replica. {origin.BY_REPLICAS}"
            ) from error

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        step = this_step()
        if step.updates_alone:
            raise ValueError(_OTHERS_WOULD_NOT_FOLLOW.format(path_of(self)))
        if step.is_reduced or self.distribute_strategy.extended.number_of_replicas == 1:
            return update_fn(own_copy(self), value, **kwargs)
        if step.gradients.are_changed([value]) and step.gradients.sum_first([value]):
            return super()._update_replica(update_fn, value, **kwargs)
        if step.assigned is not None and self.dtype.is_floating and self._differs(value):
            step.assigned.append(self)
        return super()._update_replica(update_fn, value, **kwargs)

    def _differs(self, value: Any) -> bool:
        """Return whether an assignment of ``value`` may make replicas differ that must agree."""
        is_summed = self.aggregation != tf.VariableAggregation.NONE
        return not is_summed and this_step().graph.is_of_one_replica(value)


class Statistic(Weight):
    """Float variable that a step computes from its data, and that is averaged over replicas.

    An example is the moving mean of batch normalization that is not synchronized. To get another
    rule, give the variable an ``aggregation``.
    """

    def _differs(self, value: Any) -> bool:
        return not self.is_agreed(value)

    def is_agreed(self, value: Any) -> bool:
        """Return whether a value depends only on the variable's own value and on agreed tensors.

        Agreed tensors are the same on all replicas.
        """
        agreed = this_step().agreed
        if not agreed or not isinstance(value, tf.Tensor):
            return False
        own = value.graph.capture(self._get_on_device_or_primary().handle)
        return dataflow.is_made_of(value, agreed, own)


class SampleState(Weight):
    """State of a recurrent layer, which belongs to samples: each replica has its own state."""

    def _differs(self, value: Any) -> bool:
        return False


class Tally(_Readable, SyncOnReadVariable):
    """State of a metric: each replica counts by itself, and one without rows counts nothing."""

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Assign a value; a replica without rows keeps its value. Keras calls this."""
        step = this_step()
        if step.rows is not None:
            now, value = own_copy(self).read_value(), tf.convert_to_tensor(value, self.dtype)
            value = tf.where(step.rows.absent, now, value) if step.counts else now
        return super().assign(value, *args, **kwargs)

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a value; a replica without rows adds nothing. Keras calls this."""
        return super().assign_add(self._counted(value), *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Subtract a value; a replica without rows subtracts nothing. Keras calls this."""
        return super().assign_sub(self._counted(value), *args, **kwargs)

    def _counted(self, value: Any) -> Any:
        return this_step().counted_once(tf.convert_to_tensor(value, self.dtype))


class _Saved(SaveableObject):
    """Saveable object of a variable, for checkpoints.

    It saves the value that the variable reads as outside of replicas, and restores each replica's
    copy from the saved value.
    """

    def __init__(self, variable: DistributedVariable, name: str) -> None:
        self._variable = variable
        read = functools.partial(read_from_outside, variable)
        spec = SaveSpec(
            tensor=read,
            slice_spec="",
            name=name,
            dtype=variable.dtype,
            device=first_copy(variable).device,
        )
        super().__init__(read, [spec], name)

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> tf.Operation:
        (tensor,) = restored_tensors
        done = [
            assign_on_device(v.device, v, self._variable.of_replica(i, tensor))
            for i, v in enumerate(self._variable.values)
        ]
        self._variable.restored()
        return tf.group(*done)


class _Private(Weight):
    """Variable that differs between replicas.

    ``of_replica`` computes a replica's value from the saved value.
    """

    def _differs(self, value: Any) -> bool:
        return False

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def restored(self) -> None:
        """Update dependent state after a checkpoint has given all replicas a value."""

    def _update_cross_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if not isinstance(value, DistributedValues) or isinstance(value, DistributedVariable):
            whole = tf.convert_to_tensor(value, dtype=self.dtype)
            value = regroup(tuple(self.of_replica(i, whole) for i in range(len(self.values))))
        return super()._update_cross_replica(update_fn, value, **kwargs)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return {_VALUE: lambda name=self._common_name: _Saved(self, name)}


class _OfKeras(_Private):
    """Variable that differs between replicas and that a Keras variable wraps."""

    def _serialize_to_tensors(self) -> dict[str, Any]:
        """Return the value to save in a ``tf.train.Checkpoint``.

        Keras calls this; its own method would save the value of the first replica.
        """
        return {_VALUE: self._get_cross_replica()}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> Any:
        with tf.init_scope():
            return self.assign(restored[_VALUE])


class LocalWeight(_OfKeras):
    """Weight that differs between replicas while they train in rounds: see model_rounds.py.

    Outside of replicas, it reads as the mean over replicas, or as the value that the rule keeps for
    it. An assigned or restored value goes to all replicas.

    Attributes:
        observer: object that knows what the weight reads as; the weight gets it when it is made.
    """

    observer = Observer()

    def _differs(self, value: Any) -> bool:
        return Weight._differs(self, value)

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        return whole

    def _get_cross_replica(self) -> tf.Tensor:
        seen = self.observer.as_seen(self)
        return super()._get_cross_replica() if seen is None else seen

    def _update_cross_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        done = super()._update_cross_replica(update_fn, value, **kwargs)
        self.restored()
        return done

    def restored(self) -> None:
        self.observer.assigned(self)

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        step = this_step()
        if step.is_of_all or step.is_reduced or step.rows is None:
            return super()._update_replica(update_fn, value, **kwargs)
        own = own_copy(self)
        before = own.read_value()
        super()._update_replica(update_fn, value, **kwargs)
        return own.assign(tf.where(step.nobody_has_rows, before, own.read_value()))


class LocalStatistic(LocalWeight):
    """Statistic that differs between replicas while they train in rounds."""

    def _differs(self, value: Any) -> bool:
        return True


class Seed(_Private):
    """State of a random generator, which differs between replicas that read different rows.

    Outside of replicas, and in checkpoints, it has the value that one device would have.
    """

    def _fold(self, local_id: int) -> tf.Tensor:
        extended = self.distribute_strategy.extended
        place = extended.grid.part_of_batch(extended.first_rank + local_id)
        return tf.cast(tf.constant([place * _FOLD % (1 << 32), 0], tf.int64), self.dtype)

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        """Return the seed of one replica of this process, from the common seed."""
        return whole + self._fold(local_id)

    def _get_cross_replica(self) -> tf.Tensor:
        return self._get_replica(0) - self._fold(0)


class Accumulator(_OfKeras):
    """Accumulated gradients: each replica holds a part of their sum until the window ends."""

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        """Return one replica's part of the sum over all replicas."""
        return whole / self.distribute_strategy.extended.number_of_replicas

    def _get_cross_replica(self) -> tf.Tensor:
        parts = PerReplica(tuple(v.read_value() for v in self.values))
        return self.distribute_strategy.reduce("SUM", parts, axis=None)


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


class Placed(_OfKeras):
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


class Part(_Private):
    """Part of a sum on each replica, such as a residual; from outside, it reads as all parts."""

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        """Return one replica's row; an equal part of the sum if the number of replicas changed."""
        extended = self.distribute_strategy.extended
        if whole.shape[0] == extended.number_of_replicas:
            return whole[extended.first_rank + local_id]
        return tf.reduce_sum(whole, 0) / extended.number_of_replicas  # keeps the sum

    def _get_cross_replica(self) -> tf.Tensor:
        rows = PerReplica(tuple(v.read_value()[tf.newaxis] for v in self.values))
        return self.distribute_strategy.gather(rows, axis=0)


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
        if weight is not None and not weight.observer.is_apart(weight):
            return tf.cast(weight.values[0].read_value(), self.dtype)
        return super()._get_cross_replica()


# Classes of variables that tfscale makes as slots, by where the slot lives.
_OF_SLOTS: dict[str, type[Weight]] = {ON_EACH: Part, COMMON: Weight, IN_SHARDS: Shard}

_OF_KERAS: dict[str | None, type[Weight]] = {
    LAYER_SEED: Seed,
    RNN_STATE: SampleState,
    ACCUMULATOR: Accumulator,
}


def kind_of(keywords: Mapping[str, Any], dtype: tf.DType, in_rounds: bool) -> type[Weight]:
    """Return the class of a new variable.

    Args:
        keywords: arguments that the variable is made with.
        dtype: type of the variable.
        in_rounds: whether replicas train alone between the ends of rounds.
    """
    if (placement := placed_now()) is not None:
        return placement.kind or Placed
    if (lives := created_now()) is not None:
        return _OF_SLOTS[lives]
    name, trained = keywords.get("name") or "", keywords.get("trainable") is not False
    aggregation = keywords.get("aggregation") or tf.VariableAggregation.NONE
    alone = in_rounds and dtype.is_floating
    if aggregation == tf.VariableAggregation.NONE:
        of_keras = kind_of_keras(name, dtype, trained)
        if of_keras is not None:
            return _OF_KERAS[of_keras]
    elif alone and aggregation == tf.VariableAggregation.SUM:
        raise ValueError(_SUMMED.format(name))
    elif not alone or aggregation != tf.VariableAggregation.MEAN:
        return Weight
    if alone:
        return LocalWeight if trained else LocalStatistic
    return Weight if trained else Statistic


def made(create: Callable[[], Any], keywords: Mapping[str, Any], rounds: Observer | None) -> Any:
    """Make a replicated variable of the class that fits its use.

    Args:
        create: function that makes the variable with TensorFlow.
        keywords: arguments that the variable is made with.
        rounds: rounds of the strategy; None if replicas make all steps together.
    """

    def choose(kind: type, aggregation: Any, dtype: tf.DType) -> tuple[type, Any]:
        if kind is SyncOnReadVariable:
            return Tally, aggregation
        if kind is not MirroredVariable:
            return kind, aggregation
        ours = kind_of(keywords, dtype, rounds is not None)
        if issubclass(ours, LocalWeight):  # the ends of rounds average it
            aggregation = tf.VariableAggregation.NONE
        return ours, aggregation

    with variables_of(choose):
        variable = create()
    if (placement := placed_now()) is not None:
        variable.layout, variable.team = placement.layout, placement.team
        made = variable_being_made()
        variable.keras_path = path_of(variable if made is None else made)
        placement.first = None  # TensorFlow keeps the functions that make initial values
    if rounds is not None and isinstance(variable, LocalWeight):
        variable.observer = rounds
    if isinstance(variable, Seed):
        with tf.init_scope():
            for i, component in enumerate(variable.values):
                if component.is_initialized():  # a SavedModel sets seeds later
                    component.assign(variable.of_replica(i, component.read_value()))
    return variable
