"""Sums of gradients that travel behind steps, and that all replicas apply some steps later."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.objects import counter_of, innermost, measures_curvature
from tfscale.bridge.runtime import moment
from tfscale.bridge.tensorflow import own_copy
from tfscale.exchange.background import BackgroundSums
from tfscale.native import Flight
from tfscale.native.bucket import BucketId
from tfscale.native.group import host_of
from tfscale.strategy.gradients import apply_unless, given_to, measured_curvature
from tfscale.strategy.rounds.model_rounds import when
from tfscale.strategy.rounds.pace import Pace
from tfscale.strategy.rounds.round_state import NOTHING_IN_FLIGHT, RoundFlags, RoundState
from tfscale.strategy.step import during, this_step
from tfscale.sync.bounded_staleness import BoundedStaleness, stable_rate

GRADIENTS, CURVATURE, FACTS = "gradients behind steps", "curvature behind steps", "rows and waits"

_NO_WINDOWS = (
    "sync={!r} does not accumulate gradients: it sums the gradients of each step behind the next "
    "ones. Leave out the optimizer's gradient_accumulation_steps; or use "
    "sync=tfscale.sync.EveryStep(), the default"
)
_SELDOM_CURVATURE = (
    "sync={!r} applies what an optimizer measures some steps later, and {} measures curvature in "
    "one of {} steps only. Leave out update_each; or use sync=tfscale.sync.EveryStep(), the default"
)
_OTHER_VARIABLES = (
    "sync={!r} needs the same variables in each call of optimizer.apply: the first call had "
    "gradients of {} variables, and this one has gradients of {}. Pass all gradients in one call; "
    "or use sync=tfscale.sync.EveryStep(), the default"
)
_TOO_FAST = (
    "the learning rate %.3g of plain SGD diverges with %r: with this curvature it must be less "
    "than %.3g = 2 / curvature * sin(pi / (2 (2 bound + 1))). Choose a smaller rate or bound"
)


class LateSums:
    """Sums of one model's gradients that are on their way.

    Each replica begins one sum in a step, and all apply it ``bound`` steps later, so they have the
    same weights in the same step. With the gradients travel *facts*: how many rows each replica
    had, since gradients are weighted by rows; and how long each replica has waited.

    A replica's flag ``in_flight`` says whether the sums on their way belong to its weights. If it
    is ``NOTHING_IN_FLIGHT``, as after a file has been read, the next step drops them.

    Args:
        state: state of the model's rounds, whose rule has a ``bound``.
    """

    def __init__(self, state: RoundState) -> None:
        self._state, self._bound = state, state.rule.bound
        self._reducer = state.strategy.reducer
        self._team = self._reducer.team
        self._sums, self._curvature = (
            BackgroundSums(reducer, state.label, self._bound + 1)
            for reducer in (self._reducer, state.strategy.curvature_reducer)
        )
        self._facts: dict[int, Flight] = {}
        self._variables: list[Any] = []
        self._paces: dict[int, Pace] = {}

    @property
    def skipped(self) -> int:
        """Number of batches that this process's replicas have left out."""
        return sum(int(pace.skipped.numpy()) for pace in self._paces.values())

    def thinned(self, replica: int, data: Any) -> Any:
        """Return a replica's part of a batch, without rows if the replica leaves it out."""
        return self._pace(replica).thinned(data) if self._state.rule.skips else data

    def step(self, replica: int, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Begin to sum a step's gradients, and apply the sum that is due.

        Args:
            replica: number of the replica in this process.
            grads: gradients of this replica; None for variables that the loss does not use.
            variables: variables of the gradients.
        """
        given = [i for i, gradient in enumerate(grads) if gradient is not None]
        dense = [tf.convert_to_tensor(grads[i]) for i in given]
        self._note([variables[i] for i in given])
        state, flags = self._state, self._state.of_replica(replica)
        self._reducer.prepare(state.saved, state.optimizer, self._variables, dense, rows_too=False)
        # Keras ends some epochs with a step that has no data and no gradients: it begins nothing.
        with tf.control_dependencies(dense):
            self._drop_if_void(replica, flags)
            if self._state.rule.skips:
                self._pace(replica).begun(moment())
            measured = measured_curvature(state.optimizer, list(grads), list(variables))
            self._begin(replica, flags, dense, [each for each in measured if each is not None])
            held = self._flight(replica).counts().held
            flags.staleness.assign(
                flags.staleness.read() + tf.one_hot(held - 1, self._bound + 1, dtype=tf.int64)
            )
            when(held > self._bound, lambda: self._apply(replica, flags))
        if self._state.rule.skips:
            steps = own_copy(counter_of(state.optimizer)).read_value()
            with tf.control_dependencies([steps]):
                self._pace(replica).ended(moment())

    def catch_up(self, replica: int) -> None:
        """Apply all sums that are on their way, on all replicas."""
        flags = self._state.of_replica(replica)
        if not self._variables:  # no step has been traced that begins sums
            return

        def is_under_way(number: tf.Tensor) -> tf.Tensor:
            held = self._flight(replica).counts().held
            return tf.logical_and(held > 0, flags.in_flight.read() != NOTHING_IN_FLIGHT)

        def apply_one(number: tf.Tensor) -> tuple[tf.Tensor]:
            self._apply(replica, flags)
            return (number + 1,)

        tf.while_loop(is_under_way, apply_one, [tf.constant(0)], parallel_iterations=1)

    def _note(self, variables: list[Any]) -> None:
        """Check what a step trains, and remember the variables."""
        rule, optimizer = self._state.rule, self._state.optimizer
        inner = innermost(optimizer)
        if inner.gradient_accumulation_steps:
            raise ValueError(_NO_WINDOWS.format(rule))
        if measures_curvature(inner) and inner.update_each > 1:
            name = type(inner).__name__
            raise ValueError(_SELDOM_CURVATURE.format(rule, name, inner.update_each))
        if self._variables and [id(v) for v in variables] != [id(v) for v in self._variables]:
            raise ValueError(_OTHER_VARIABLES.format(rule, len(self._variables), len(variables)))
        if not self._variables:
            # Evaluations that were traced before do not catch up.
            self._state.model.test_function = self._state.model.predict_function = None
        self._variables = variables

    def _begin(
        self,
        replica: int,
        flags: RoundFlags,
        dense: Sequence[tf.Tensor],
        curvature: Sequence[tf.Tensor],
    ) -> None:
        state, step = self._state, this_step()
        assert step.rows is not None
        rows = tf.cast(step.rows.local, tf.float32)

        def begin(sums: BackgroundSums, what: str, values: Sequence[tf.Tensor]) -> None:
            own = [step.counted(x) * tf.cast(rows, x.dtype) for x in values]
            sums.begin(what, own, self._variables, state.optimizer, state.saved)

        begin(self._sums, GRADIENTS, dense)
        if curvature:
            begin(self._curvature, CURVATURE, curvature)
        self._begin_facts(replica, rows, tf.cast(flags.waited_last.read(), tf.float32))
        flags.in_flight.assign(0)

    def _begin_facts(self, replica: int, rows: tf.Tensor, waited: tf.Tensor) -> None:
        """Begin to tell others how many rows this replica had, and how long it has waited."""
        facts = [rows[tf.newaxis]]
        facts.append(tf.one_hot(self._team.rank(replica), self._team.size, waited, 0.0))
        if (balance := self._state.strategy.balance) is not None:
            # Each number comes from one replica, and has less than 24 bits or needs no more.
            facts.append(tf.cast(balance.news(replica).own(), tf.float32))

        def begun(number: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            self._flight(number).begin(
                tensors[0],
                schedule=self._team.schedule("fp32", tensors[0]),
                name=self._team.communicators[number].new_bucket(
                    BucketId(FACTS, self._state.label)
                ),
            )
            return []

        self._team.together(begun, [tf.concat(facts, 0)])

    def _take_facts(self, replica: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the oldest facts: all replicas' rows, and each rank's wait; and this wait."""
        size, balance = self._team.size, self._state.strategy.balance
        sizes = [1, size] if balance is None else [1, size, 3 * size]

        def taken(number: int, _: list[Any]) -> list[tf.Tensor]:
            found = self._flight(number).take([sum(sizes)])
            return [found.total, found.waited]

        facts, waited = self._team.together(taken, [])
        rows, waits, *news = tf.split(facts, sizes)
        if balance is not None:
            balance.news(replica).follow(tf.cast(news[0], tf.int64))
        return rows[0], tf.cast(waits, tf.float64), waited

    def _apply(self, replica: int, flags: RoundFlags) -> None:
        """Apply the oldest sum."""
        state, optimizer = self._state, self._state.optimizer
        flags.in_flight.assign(NOTHING_IN_FLIGHT)  # the others are void, if this one fails
        rows, waits, waited_for_facts = self._take_facts(replica)
        sums, waited, took = self._sums.take(GRADIENTS, self._variables, optimizer, state.saved)
        waited = tf.maximum(waited, waited_for_facts)
        flags.waited.assign(flags.waited.read() + waited)
        flags.took.assign(flags.took.read() + took)
        flags.waited_last.assign(waited)
        flags.waits.assign(flags.waits.read() + waits)
        if state.rule.skips:
            self._tell_pace(replica, waits)
        curvature: list[tf.Tensor] = []
        if measures_curvature(innermost(optimizer)):
            curvature, *_ = self._curvature.take(CURVATURE, self._variables, optimizer, state.saved)

        def means_of(totals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            pairs = zip(totals, self._variables) if totals else ()
            return [tf.cast(total, v.dtype) / tf.cast(rows, v.dtype) for total, v in pairs]

        def apply() -> None:
            measured = given_to(optimizer, means_of(curvature))
            with during(this_step().as_reduced()), measured:
                optimizer.apply(means_of(sums), self._variables)

        apply_unless(rows <= 0, apply, optimizer)
        flags.in_flight.assign(0)

    def _drop_if_void(self, replica: int, flags: RoundFlags) -> None:
        def drop() -> None:
            self._sums.drop(replica)
            self._curvature.drop(replica)
            self._flight(replica).drop()

        when(flags.in_flight.read() == NOTHING_IN_FLIGHT, drop)

    def _tell_pace(self, replica: int, waits: tf.Tensor) -> None:
        own = waits[self._team.rank(replica)]
        others = (tf.reduce_sum(waits) - own) / (self._team.size - 1)
        self._pace(replica).compare(own, others)

    def _pace(self, replica: int) -> Pace:
        if replica not in self._paces:
            self._paces[replica] = Pace(host_of(self._state.strategy.extended.devices[replica]))
        return self._paces[replica]

    def _flight(self, replica: int) -> Flight:
        if replica not in self._facts:
            self._facts[replica] = Flight(self._team.communicators[replica], self._bound + 1)
        return self._facts[replica]


def warn_of_rate(rule: Any, optimizer: Any) -> None:
    """Warn if plain SGD diverges at its present rate, as far as the curvature is known."""
    if not isinstance(rule, BoundedStaleness) or rule.curvature is None:
        return
    if type(optimizer) is not keras.optimizers.SGD or optimizer.momentum:
        return
    rate, limit = float(optimizer.learning_rate), stable_rate(rule.bound, rule.curvature)
    if rate >= limit:
        logging.getLogger("tfscale").warning(_TOO_FAST, rate, rule, limit)
