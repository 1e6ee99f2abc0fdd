"""Round of one replica: what a rule may do with the weights, alone and with the other replicas."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import counter_of
from tfscale.bridge.tensorflow import own_copy
from tfscale.collectives import Schedule
from tfscale.collectives.wires import LOSSLESS
from tfscale.exchange.packing import place_of
from tfscale.native.bucket import BucketId
from tfscale.parallel.layout import Flat
from tfscale.strategy.rounds.round_state import COUNTERS, NOTHING_IN_FLIGHT, RoundFlags, RoundState
from tfscale.sync.gossip import refuse_if_mean_changes
from tfscale.sync.hierarchical import MIXES_REPLICAS

# Names of exchanges in logs.
MIXED, SHARDS, SUM_INTO = "weights to mix", "shards of the {}", "sum into the {}"


class ReplicaRound:
    """``Round`` of one replica, as its rule uses it.

    Args:
        state: state of the model's rounds.
        replica: number of the replica in this process.
        flags: flags of the replica.

    Attributes:
        position: number of steps that are done in this round.
        rounds: number of rounds that are over, with the synchronous start as the first.
        steps: number of the optimizer's steps after the last step of a round.
    """

    def __init__(self, state: RoundState, replica: int, flags: RoundFlags) -> None:
        self.replica, self.flags = replica, flags
        self.replicas = state.teams.number
        self.trained, self.weights = state.trained, [v.values[replica] for v in state.weights]
        self.position, self.rounds, self.steps = (
            state.saved.kept(*key, replica) for key in COUNTERS
        )
        self._state, self._team, self._part = state, state.reducer.team, 0

    # -- for rules

    @property
    def number(self) -> tf.Tensor:
        return tf.cast(self.rounds.read_value(), tf.int32)

    @property
    def in_flight(self) -> tf.Tensor:
        return tf.ensure_shape(self.flags.in_flight.read(), [])

    def part(self, number: int, places: Sequence[int]) -> ReplicaRound:
        part = copy.copy(self)
        part.weights = [self.weights[place] for place in places]
        part.trained = [self.trained[place] for place in places]
        part._part = number
        return part

    def send(self, values: Sequence[tf.Tensor]) -> None:
        state, values = self._state, self._one_for_each(values, "send")
        state.background.begin(self._changes, values, self.trained, state.optimizer, state.saved)
        self.flags.in_flight.assign(self._part)

    def take(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        state, flags, values = self._state, self.flags, self._one_for_each(values, "take")
        flags.in_flight.assign(NOTHING_IN_FLIGHT)  # on all replicas, even if the exchange fails
        sums, waited, took = state.background.take(
            self._changes, self.trained, state.optimizer, state.saved
        )
        flags.waited.assign(flags.waited.read() + waited)
        flags.took.assign(flags.took.read() + took)
        sums = [tf.cast(total, value.dtype) for total, value in zip(sums, values, strict=True)]
        return self._means_of(sums, values)

    @property
    def _changes(self) -> str:
        return f"changes of fragment {self._part}"

    def mean(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        state, values = self._state, self._one_for_each(values, "mean")
        sums = state.reducer.reduce(
            values, self.trained, state.optimizer, state.saved, label=state.label
        )
        return self._means_of(sums, values)

    def _one_for_each(self, values: Sequence[tf.Tensor], operation: str) -> list[tf.Tensor]:
        """Return values as a list, or raise if a rule has passed too few or too many."""
        found = list(values)
        if len(found) != len(self.weights):
            raise ValueError(
                f"sync={self._state.rule!r} passes {len(found)} values to round.{operation}; "
                f"expected one for each of the {len(self.weights)} weights of round.weights"
            )
        return found

    def _means_of(self, sums: Sequence[tf.Tensor], values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        means = self._divided(sums)
        self._note_drift(values, means)
        return means

    def _divided(self, sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [total / tf.cast(self._team.size, total.dtype) for total in sums]

    def mix(
        self, values: Sequence[tf.Tensor], mixtures: Sequence[Schedule], wire: str = LOSSLESS
    ) -> list[tf.Tensor]:
        state, values = self._state, self._one_for_each(values, "mix")
        if state.teams.size > 1:
            raise ValueError(MIXES_REPLICAS.format(f"sync={state.rule!r}"))
        refuse_if_mean_changes(state.rule, mixtures)
        state.mixtures, state.mixed_on = list(mixtures), wire
        seed = self.rounds.read_value()

        def mixed(mixture: Schedule) -> list[tf.Tensor]:
            mix = functools.partial(self._team.mix, schedule=mixture, wire=wire, seed=seed)
            return self._run(mix, values, MIXED)

        every = [functools.partial(mixed, mixture) for mixture in mixtures]
        result = list(tf.switch_case(self.number % len(mixtures), every))
        self._note_drift(values, result)
        return result

    def kept(self, name: str) -> list[tf.Tensor]:
        values = self.values_of(name)
        if name in self._state.rule.in_shards and name == self._state.rule.reads_as:
            self._note_drift([weight.read_value() for weight in self.weights], values)
        return values

    def keep(self, name: str, values: Sequence[tf.Tensor]) -> None:
        values = self._one_for_each(values, "keep")
        if name in self._state.rule.in_shards:
            rank = self._team.rank(self.replica)
            values = [self._flat(value).rows(value)[rank] for value in values]
        for variable, value in zip(self._kept(name), values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))

    def add(self, name: str, values: Sequence[tf.Tensor]) -> None:
        if name not in self._state.rule.in_shards:
            raise ValueError(
                f"sync={self._state.rule!r} calls round.add({name!r}), but {name!r} is not in "
                f"shards: the rule's in_shards is {self._state.rule.in_shards!r}. Add the name to "
                "in_shards; or call round.keep with values that are equal on all replicas"
            )
        values = self._one_for_each(values, "add")
        kept = self._kept(name)
        pairs = zip(kept, values, strict=True)
        rows = [self._flat(value).rows(tf.cast(value, shard.dtype)) for shard, value in pairs]
        own = self._run_on_one(self._team.scatter, tf.concat(rows, 1), SUM_INTO.format(name))
        sums = tf.split(own[0], [row.shape[1] for row in rows])
        for variable, shard in zip(kept, sums, strict=True):
            variable.assign_add(
                shard / self._state.teams.size
            )  # a team's replicas add equal values

    def average_optimizer(self) -> None:
        self.average(self._state.of_optimizer, "the optimizer's")

    def outer_step(self, gradients: Sequence[tf.Tensor], counts: bool = True) -> None:
        outer = self._state.outer
        outer.apply(list(gradients), self.trained)
        if not counts:
            own_copy(counter_of(outer)).assign_sub(1)

    # -- for the strategy

    def optimizer_steps(self) -> tf.Tensor:
        """Return the number of steps that the optimizer has made."""
        counter = own_copy(counter_of(self._state.optimizer))
        return tf.cast(counter.read_value(), self.steps.dtype)

    def values_of(self, name: str) -> list[tf.Tensor]:
        """Return the whole values that are kept under a name, in the types of the weights."""
        values = [variable.read_value() for variable in self._kept(name)]
        if name in self._state.rule.in_shards:
            every = self.gathered(tf.concat(values, 0), SHARDS.format(name))
            parts = tf.split(every, [shard.shape[0] for shard in values], axis=1)
            pairs = zip(parts, self.weights, strict=True)
            values = [self._flat(weight).whole(rows) for rows, weight in pairs]
        return [tf.cast(x, weight.dtype) for x, weight in zip(values, self.weights, strict=True)]

    def average(self, variables: Sequence[Any], what: str) -> None:
        """Replace variables by their means over all replicas."""
        own = [v.values[self.replica] for v in variables]
        if not own:
            return
        sums = self._run(self._team.sum_all, [v.read_value() for v in own], what)
        for variable, mean in zip(own, self._divided(sums), strict=True):
            variable.assign(mean)

    def gathered(self, row: tf.Tensor, what: str) -> tf.Tensor:
        """Return the rows of all replicas."""
        return self._run_on_one(self._team.gather, row[tf.newaxis], what)

    def _run(
        self, collective: Callable[..., Any], values: Sequence[tf.Tensor], what: str
    ) -> list[tf.Tensor]:
        """Run a collective on all replicas: ``collective(replica, values, name=...)``."""
        name = BucketId(what, self._state.label)
        return self._team.together(
            lambda replica, own: collective(replica, own, name=name), list(values)
        )

    def _run_on_one(self, collective: Callable[..., Any], value: tf.Tensor, what: str) -> Any:
        """Run a collective of one tensor on all replicas."""
        name = BucketId(what, self._state.label)
        return self._team.together_on_one(
            lambda replica, own: collective(replica, own, name), value
        )

    def _flat(self, value: tf.Tensor | tf.Variable) -> Flat:
        """Return the layout of the shards in which replicas keep a value of this shape."""
        return Flat(tuple(value.shape), self._team.size)

    def _kept(self, name: str) -> list[tf.Variable]:
        state = self._state
        if name not in state.rule.keeps:
            raise ValueError(
                f"sync={state.rule!r} uses the kept values {name!r}, but the rule's attribute "
                f"keeps is {state.rule.keeps!r}. Add {name!r} to keeps"
            )
        places = [place_of(state.optimizer, v) for v in self.trained]
        return [state.saved.kept(name, place, self.replica) for place in places]

    def _note_drift(self, values: Sequence[tf.Tensor], means: Sequence[tf.Tensor]) -> None:
        apart = [value - mean for value, mean in zip(values, means, strict=True)]
        self.flags.drift.assign(tf.linalg.global_norm([tf.cast(x, tf.float32) for x in apart]))
