"""Variables of which every replica holds a copy.

Weights are the same on all replicas because their updates are the same. Four kinds of variables
differ: seeds, statistics, counts of metrics, and accumulated gradients. If replicas agree only once
in many steps, each replica also has its own weights, statistics and values of optimizers in
between: ``LocalWeight``.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.bridge.calls import is_for_each_row
from tfscale.bridge.objects import path_of
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
    own_copy,
    read_from_outside,
    regroup,
)
from tfscale.exchange import dataflow
from tfscale.strategy import origin
from tfscale.strategy.losses import own_losses
from tfscale.strategy.statistics import of_first_replica
from tfscale.strategy.step import Assigned, Step, this_step

_AGGREGATED = (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN)

_VALUE = "VARIABLE_VALUE"  # name of a value in TensorFlow's checkpoints

# Difference between the seeds of two replicas, in the first word of a generator's state: so large
# that no two replicas ever draw the same numbers.
_FOLD = 0x9E3779B1

_OTHERS_WOULD_NOT_FOLLOW = (
    "update_step() assigns {!r}, which is neither the weight nor one of its slots. In a pipeline, "
    "and with shard='optimizer', some replicas update a weight, and the others would not follow. "
    "Make a slot of each weight with self.add_variable_from_reference(weight, name=...), assign "
    "common state outside of update_step(), or leave pipeline and shard out"
)


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

    Attributes:
        beside: key of the weight whose slot this is; empty for a variable that is no slot.
        differs_between_teams: whether replicas of several teams may have different values.
    """

    beside: str = ""
    differs_between_teams = False

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
        if self.aggregation in _AGGREGATED:  # the program says how parts become a whole
            return super()._update_replica(update_fn, value, **kwargs)
        is_sum = step.gradients.are_used([value]) and self._get_sums(value)
        if step.assigned is None or not self.dtype.is_floating:
            return super()._update_replica(update_fn, value, **kwargs)
        differs = not is_sum and self._differs(value)
        value, agrees = self._agreed(value) if differs else (value, True)
        if not agrees:  # it gets the mean of all replicas later
            step.assigned.differ_by_replica.append(self)
        elif self.differs_between_teams:
            step.assigned.differ_by_team.append(self)
        if differs:
            return update_fn(own_copy(self), value, **kwargs)
        return super()._update_replica(update_fn, value, **kwargs)

    def _agreed(self, value: Any) -> tuple[Any, bool]:
        """Return a value for all replicas, if it is known now; else the value; and which it is."""
        step = this_step()
        if not step.graph.is_graph_of_batch(tf.compat.v1.get_default_graph()):
            return value, False  # in a branch, no replica may wait for others
        if own_losses.is_part(value):
            return own_losses.whole_number(value), True
        if step.graph.is_random(value) and not _reads_one_of(step, value):
            (value,) = of_first_replica(self.distribute_strategy.extended.team, [value])
            return value, True
        return value, False

    def _get_sums(self, value: Any) -> bool:
        """Sum the gradients behind a value; return whether it is the same on all replicas then."""
        given, strategy = this_step().gradients, self.distribute_strategy
        if not given.are_of(self):
            if is_for_each_row():
                this_step().note_scaled(own_copy(self), value)
                return False
            if strategy.rounds is None and not given.come_late:
                strategy.kept.add(own_copy(self))
        return bool(given.sum_first([value], variable=self))

    def _differs(self, value: Any) -> bool:
        """Return whether an assignment of ``value`` may make replicas differ that must agree."""
        step = this_step()
        return step.graph.is_of_one_replica(value) or _reads_one_of(step, value)


def _reads_one_of(step: Step, value: Any) -> bool:
    """Return whether a value is computed from a variable that differs between replicas now."""
    assigned = step.assigned or Assigned()
    differ = {id(own_copy(v).handle) for v in assigned.differ_by_replica}
    if not differ or not isinstance(value, tf.Tensor):
        return False
    return dataflow.reading([value], differ)[0]


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
        return tf.group(*done)


class Private(Weight):
    """Variable that differs between replicas.

    ``of_replica`` computes a replica's value from the saved value.
    """

    def _differs(self, value: Any) -> bool:
        return False

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def _update_cross_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if not isinstance(value, DistributedValues) or isinstance(value, DistributedVariable):
            whole = tf.convert_to_tensor(value, dtype=self.dtype)
            value = regroup(tuple(self.of_replica(i, whole) for i in range(len(self.values))))
        return super()._update_cross_replica(update_fn, value, **kwargs)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return {_VALUE: lambda name=self._common_name: _Saved(self, name)}


class OfKeras(Private):
    """Variable that differs between replicas and that a Keras variable wraps."""

    def _serialize_to_tensors(self) -> dict[str, Any]:
        """Return the value to save in a ``tf.train.Checkpoint``.

        Keras calls this; its own method would save the value of the first replica.
        """
        return {_VALUE: self._get_cross_replica()}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> Any:
        with tf.init_scope():
            return self.assign(restored[_VALUE])


class LocalWeight(OfKeras):
    """Weight that differs between replicas while they train in rounds: see model_rounds.py.

    Outside of replicas, it reads as the mean over replicas, or as the value that the rule keeps for
    it. An assigned or restored value goes to all replicas.
    """

    differs_between_teams = True

    def _differs(self, value: Any) -> bool:
        return Weight._differs(self, value)

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        return whole

    def _get_cross_replica(self) -> tf.Tensor:
        seen = self.distribute_strategy.rounds.as_seen(self)
        return super()._get_cross_replica() if seen is None else seen

    def _update_cross_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        done = super()._update_cross_replica(update_fn, value, **kwargs)
        self.distribute_strategy.rounds.assigned(self)
        return done

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


class Seed(Private):
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


class Accumulator(OfKeras):
    """Accumulated gradients: each replica holds a part of their sum until the window ends."""

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        """Return one replica's part of the sum over all replicas."""
        return whole / self.distribute_strategy.extended.number_of_replicas

    def _get_cross_replica(self) -> tf.Tensor:
        parts = PerReplica(tuple(v.read_value() for v in self.values))
        return self.distribute_strategy.reduce("SUM", parts, axis=None)


class Part(Private):
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
