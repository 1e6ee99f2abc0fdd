"""The state of layers, of which every replica holds a copy.

Weights are the same on all replicas because their updates are. Four kinds of variables
are not: seeds, statistics, what metrics count, and sums of gradients that wait for a step. Where
replicas agree once in many steps, weights, statistics and what optimizers keep are each replica's
own in between: ``LocalWeight``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.bridge.objects import LAYER_SEED
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
    variables_of,
)
from tfscale.exchange import dataflow, shards
from tfscale.exchange.state import COMMON, PART, ROUNDING_SEED, SHARD
from tfscale.strategy import origin
from tfscale.strategy.current import current

_VALUE = "VARIABLE_VALUE"  # as TensorFlow's checkpoints call it

# Far apart in the first word of a generator's state, so that no two replicas
# ever draw the same numbers.
_FOLD = 0x9E3779B1


class _Readable:
    """What Python and numpy ask of a variable: of a learning rate, or of what a metric returns."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.numpy())  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.numpy())  # type: ignore[attr-defined]


class Weight(_Readable, MirroredVariable):
    """A variable whose updates are the same on all replicas once gradients are.

    What a replica assigns by itself, and has made of its samples, is averaged as statistics are.
    """

    @property
    def handle(self) -> Any:
        """Of this replica's copy; a tape asks for it when it computes a gradient."""
        try:
            return super().handle
        except ValueError as error:
            raise ValueError(
                f"{self.name} has a copy on each replica, and a gradient with respect to it was "
                f"asked for outside of replicas. {origin.BY_REPLICAS}"
            ) from error

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if current.reduced or self.distribute_strategy.extended.number_of_replicas == 1:
            return update_fn(own_copy(self), value, **kwargs)
        if current.statistics is not None and self.dtype.is_floating and self._differs(value):
            current.statistics.append(self)
        return super()._update_replica(update_fn, value, **kwargs)

    def _differs(self, value: Any) -> bool:
        """Whether replicas that assign such a value may come to differ, and must not."""
        return self.aggregation == tf.VariableAggregation.NONE and _made_by_one_replica(value)


def _made_by_one_replica(value: Any) -> bool:
    """Whether its samples or its random numbers are in it; eagerly nobody can tell."""
    if tf.executing_eagerly():
        return True
    batch = current.batch_ops
    parts = [x for x in tf.nest.flatten(value, expand_composites=True) if isinstance(x, tf.Tensor)]
    return any(
        dataflow.gathered(parts, lambda op: op in batch or "Random" in op.type, current.origins)
    )


class Statistic(Weight):
    """Float state that a step derives from its data: averaged over replicas.

    Batch normalization's moving mean is an example, where it is not synchronized. To get another
    rule, give the variable an ``aggregation`` of its own.
    """

    def _differs(self, value: Any) -> bool:
        return not self._is_agreed(value)

    def _is_agreed(self, value: Any) -> bool:
        """Whether all it is made of is its own value and what is the same on all replicas."""
        if not current.agreed or not isinstance(value, tf.Tensor):
            return False
        own = value.graph.capture(self._get_on_device_or_primary().handle)
        return dataflow.is_made_of(value, current.agreed, own)


class SampleState(Weight):
    """Of a recurrent layer: it belongs to samples, and each replica has its own."""

    def _differs(self, value: Any) -> bool:
        return False


class Tally(_Readable, SyncOnReadVariable):
    """A metric's state: each replica counts by itself, and one without rows counts nothing."""

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Keras calls it; a replica without rows keeps its value."""
        if current.rows is not None:
            now = own_copy(self).read_value()
            value = tf.where(current.rows.absent, now, tf.convert_to_tensor(value, self.dtype))
        return super().assign(value, *args, **kwargs)

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Keras calls it; a replica without rows adds nothing."""
        return super().assign_add(self._counted(value), *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Keras calls it; a replica without rows subtracts nothing."""
        return super().assign_sub(self._counted(value), *args, **kwargs)

    def _counted(self, value: Any) -> Any:
        value = tf.convert_to_tensor(value, self.dtype)
        return value if current.rows is None else current.rows.counted(value)


class _Saved(SaveableObject):
    """Saves what a variable reads as from outside, and restores by assigning that."""

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
    """Differs between replicas: ``of_replica`` computes a replica's value from the saved one."""

    def _differs(self, value: Any) -> bool:
        return False

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def restored(self) -> None:
        """Called when all replicas have got a value of a checkpoint."""

    def _update_cross_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if not isinstance(value, DistributedValues) or isinstance(value, DistributedVariable):
            whole = tf.convert_to_tensor(value, dtype=self.dtype)
            value = regroup(tuple(self.of_replica(i, whole) for i in range(len(self.values))))
        return super()._update_cross_replica(update_fn, value, **kwargs)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return {_VALUE: lambda name=self._common_name: _Saved(self, name)}


class _OfKeras(_Private):
    """One that a variable of Keras holds."""

    def _serialize_to_tensors(self) -> dict[str, Any]:
        """Called by Keras for ``tf.train.Checkpoint``, which else saves the first replica's."""
        return {_VALUE: self._get_cross_replica()}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> Any:
        with tf.init_scope():
            return self.assign(restored[_VALUE])


class LocalWeight(_OfKeras):
    """Each replica's own between the agreements of a rule: see course.py.

    Outside of replicas it reads as the mean over them, or as what the rule keeps for it. What is
    assigned there, or restored, all replicas get.
    """

    def _differs(self, value: Any) -> bool:
        return Weight._differs(self, value)

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        return whole

    def _get_cross_replica(self) -> tf.Tensor:
        seen = self.distribute_strategy.rounds.as_seen(self)
        return super()._get_cross_replica() if seen is None else seen

    def _update_cross_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        done = super()._update_cross_replica(update_fn, value, **kwargs)
        self.restored()
        return done

    def restored(self) -> None:
        self.distribute_strategy.rounds.assigned(self)

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if current.alone is False or current.reduced or current.rows is None:
            return super()._update_replica(update_fn, value, **kwargs)
        own = own_copy(self)
        before = own.read_value()
        super()._update_replica(update_fn, value, **kwargs)
        return own.assign(tf.where(current.rows.nobody, before, own.read_value()))


class LocalStatistic(LocalWeight):
    """The same, of a statistic."""

    def _differs(self, value: Any) -> bool:
        return True


class Seed(_Private):
    """A random generator's state, another on each replica.

    Outside of replicas, and in checkpoints, it is what one device would have.
    """

    def _fold(self, local_id: int) -> tf.Tensor:
        replica = self.distribute_strategy.extended.first_rank + local_id
        return tf.cast(tf.constant([replica * _FOLD % (1 << 32), 0], tf.int64), self.dtype)

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        """The seed of one replica of this process, made of that which all share."""
        return whole + self._fold(local_id)

    def _get_cross_replica(self) -> tf.Tensor:
        return self._get_replica(0) - self._fold(0)


class Accumulator(_OfKeras):
    """Gradients that wait for the end of a window: a part of their sum on each replica."""

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        """One replica's part of the sum of all."""
        return whole / self.distribute_strategy.extended.number_of_replicas

    def _get_cross_replica(self) -> tf.Tensor:
        parts = PerReplica(tuple(v.read_value() for v in self.values))
        return self.distribute_strategy.reduce("SUM", parts, axis=None)


class Part(_Private):
    """Each replica's part of a sum, such as a residual; outside of replicas, one reads all."""

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        """One replica's row; an equal part of the sum if there were other replicas before."""
        extended = self.distribute_strategy.extended
        if whole.shape[0] == extended.number_of_replicas:
            return whole[extended.first_rank + local_id]
        return tf.reduce_sum(whole, 0) / extended.number_of_replicas  # nothing is lost

    def _get_cross_replica(self) -> tf.Tensor:
        rows = PerReplica(tuple(v.read_value()[tf.newaxis] for v in self.values))
        return self.distribute_strategy.gather(rows, axis=0)


class Shard(_Private):
    """Each replica's shard of a tensor; outside of replicas, one reads and assigns all of it.

    Attributes:
        whole_shape: the tensor's.
        weight: that is equal to it while all replicas have the same, so that a worker may read it
            alone, as weights then; None if there is none.
    """

    whole_shape: tuple[int, ...]
    weight: Any

    def of_replica(self, local_id: int, whole: tf.Tensor) -> tf.Tensor:
        extended = self.distribute_strategy.extended
        every = shards.split(whole, extended.number_of_replicas)
        return every[extended.first_rank + local_id]

    def _get_cross_replica(self) -> tf.Tensor:
        strategy = self.distribute_strategy
        if self.weight is not None and not strategy.rounds.is_apart(self.weight):
            return tf.cast(self.weight.values[0].read_value(), self.dtype)
        rows = PerReplica(tuple(v.read_value()[tf.newaxis] for v in self.values))
        return shards.join(strategy.gather(rows, axis=0), self.whole_shape)


def kind_of(keywords: dict[str, Any]) -> type[Weight]:
    """Which of these a new variable is, by the arguments that it is made with."""
    name = _name_of(keywords)
    aggregation = keywords.get("aggregation") or tf.VariableAggregation.NONE
    if aggregation != tf.VariableAggregation.NONE:
        return Weight
    if name in _BY_NAME:
        return _BY_NAME[name]
    if "gradient_accumulator" in name:
        return Accumulator
    return Statistic if keywords.get("trainable") is False else Weight


def _in_rounds(kind: type[Weight], keywords: dict[str, Any]) -> type[Weight]:
    """Return the kind of a variable that replicas update while they make steps alone.

    A variable that asks for means gets them at the ends of rounds, as statistics do.
    """
    aggregation = keywords.get("aggregation")
    if aggregation == tf.VariableAggregation.SUM:
        raise ValueError(
            f"the variable {_name_of(keywords)!r} is to be summed over replicas whenever one "
            'assigns it (aggregation="sum"), and in rounds replicas train alone. Leave '
            "aggregation out, which gives means at the ends of rounds; or use "
            "sync=tfscale.sync.EveryStep()"
        )
    if aggregation == tf.VariableAggregation.MEAN:
        return LocalStatistic if keywords.get("trainable") is False else LocalWeight
    if kind is Statistic:
        return LocalStatistic
    return LocalWeight if kind is Weight and not _is_common(keywords) else kind


def _is_common(keywords: dict[str, Any]) -> bool:
    aggregation = keywords.get("aggregation") or tf.VariableAggregation.NONE
    return aggregation != tf.VariableAggregation.NONE or _name_of(keywords) in _BY_NAME


def _name_of(keywords: dict[str, Any]) -> str:
    return (keywords.get("name") or "").split("/")[-1].split(":")[0]


_BY_NAME: dict[str, type[Weight]] = {
    LAYER_SEED: Seed,
    "rnn_state": SampleState,
    PART: Part,
    COMMON: Weight,
    SHARD: Shard,
    ROUNDING_SEED: Weight,
}


def made(create: Callable[[], Any], keywords: dict[str, Any], rounds: Any) -> Any:
    """Make a replicated variable of the class that its use asks for.

    Args:
        create: makes the variable by TensorFlow's means.
        keywords: arguments that it is made with.
        rounds: rounds of the strategy; None if replicas make all steps together.
    """

    def choose(kind: type, aggregation: Any, dtype: tf.DType) -> tuple[type, Any]:
        if kind is SyncOnReadVariable:
            return Tally, aggregation
        if kind is not MirroredVariable:
            return kind, aggregation
        ours = kind_of(keywords)
        if rounds is not None and dtype.is_floating:
            ours = _in_rounds(ours, keywords)
            if aggregation == tf.VariableAggregation.MEAN:
                aggregation = tf.VariableAggregation.NONE
            if rounds.makes_outer and issubclass(ours, LocalWeight):
                ours = Weight
        return ours, aggregation

    with variables_of(choose):
        variable = create()
    if isinstance(variable, Seed):
        with tf.init_scope():
            for i, component in enumerate(variable.values):
                if not component.is_initialized():  # of a SavedModel, whose seeds come later
                    continue
                component.assign(variable.of_replica(i, component.read_value()))
    return variable
