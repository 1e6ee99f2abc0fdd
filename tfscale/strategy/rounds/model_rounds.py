"""Rounds of one model: steps that each replica makes alone, and a synchronization at their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.gradients import ending_with_their_graphs
from tfscale.bridge.objects import counter_of, innermost, optimizers_of
from tfscale.bridge.tensorflow import PerReplica, own_copy, read_from_outside, replica_id
from tfscale.native.cell import Cell, make_cell
from tfscale.native.group import host_of
from tfscale.strategy.rounds.round import ReplicaRound
from tfscale.strategy.rounds.round_state import NOTHING_IN_FLIGHT, RoundState
from tfscale.strategy.step import Step, during, this_step
from tfscale.strategy.variables import LocalWeight


class ModelRounds:
    """State machine of the rounds of one model.

    ``RoundState`` lists the state: what files hold (the position in the round, the numbers of
    rounds and steps, the rule's values), and what no file holds (the flags of each replica, and
    whether workers have batches left).

    The transitions are operations in a traced step, on every replica, in branches that most steps
    skip. No Python code runs between them:

    - begin, before the first step of a round: the rule's ``begin``;
    - land, ``rule.delay`` steps later: the rule's ``land`` takes what the last round has sent;
    - end, after the last step of a round: the rule's ``end``, means of statistics, and on several
      workers their counts;
    - show, before a step of an evaluation: put the replica's weights aside, and load the weights to
      evaluate;
    - put back, before the next step of training: restore the replica's own weights.

    Python code starts these transitions, between steps:

    - close, at the end of ``fit``: put back, end and the rule's ``settle`` make all replicas
      identical;
    - load, after a file has been read: reset the flags; see ``RoundState``;
    - assign, after a weight has been assigned in the middle of a round: the rule's kept weights
      become the same.

    Args:
        state: state of the model's rounds.
    """

    def __init__(self, state: RoundState) -> None:
        self.state, self._rule = state, state.rule
        self.team = state.teams.team
        self._several_workers = state.strategy.extended.number_of_workers > 1
        self._statistics: list[Any] = []
        self._spare: dict[Any, Cell] = {}
        self._close: Any = None

    # -- on a replica, while a step is traced

    def before_step(self) -> Any:
        """Begin a step of training, and return whether replicas make the step alone.

        The answer is True, False or a tensor, as in ``Step.alone``.
        """
        if refusal := self._refusal():
            raise ValueError(f"sync={self._rule!r} {refusal}")
        round = self._round()
        when(round.flags.shown.read(), lambda: self._put_back(round))
        when(round.steps.read_value() != round.optimizer_steps(), lambda: _begin_anew(round))
        if self._rule.keeps:
            when(self._begins(round), lambda: _on_all_replicas(self._rule.begin, round))
        return True if not self._rule.start else round.rounds.read_value() > 0

    def after_step(self, statistics: Sequence[Any]) -> None:
        """Count a step of training, and end the round if this step is its last one.

        Args:
            statistics: variables that the step has assigned, except those of the optimizer.
        """
        mixed = {id(weight) for weight in self._mixed_by_rule()}
        others = [v for v in [*self._statistics, *statistics] if id(v) not in mixed]
        self._statistics = list({id(v): v for v in others}.values())
        round, alone = self._round(), this_step().alone
        for flag in (round.flags.weights_differ, round.flags.optimizers_differ):
            flag.assign(True if alone is True else tf.logical_or(flag.read(), alone))
        round.steps.assign(round.optimizer_steps())
        self._after_local_step(round, round.position.assign_add(1, read_value=True))

    def _mixed_by_rule(self) -> Sequence[Any]:
        """Return the weights that the rule mixes at the end of a round."""
        weights: Sequence[Any] = self.state.weights
        return weights

    def before_evaluation(self) -> None:
        """Load the weights to evaluate, before a step of an evaluation or a prediction."""
        if self.state.model.built and not self._refusal():
            self._before_evaluation(self._round())

    def thinned(self, data: Any) -> Any:
        """Return this replica's part of a batch, without rows if the replica leaves it out."""
        return data

    def count_batches(self, replicas: tf.Tensor) -> tf.Tensor:
        """Return how many replicas get a batch in the next step, as far as this worker knows.

        A worker that has run out of batches takes part in the ends of rounds until all workers
        have.

        Args:
            replicas: number of this worker's replicas that get a batch.
        """
        others, left = self.state.others_have_batches, tf.reduce_sum(replicas)
        found = tf.where(others.read(), tf.maximum(replicas, 1), replicas)
        over = tf.reduce_sum(found) == 0  # the next epoch has batches again
        self.state.has_batches.assign(tf.where(over, tf.ones_like(left), left))
        others.assign(tf.logical_or(others.read(), over))
        return found

    def spare_row(self, place: int, like: tf.Tensor) -> Cell:
        """Return the cell in which this replica keeps a row for batches in which it holds no rows.

        Args:
            place: position of the tensor among those of a batch.
            like: tensor that gives the row's type and shape.
        """
        key = (replica_id(), place, like.dtype, like.shape.rank)
        if key not in self._spare:
            with tf.init_scope():
                row = tf.zeros([1, *(size or 1 for size in like.shape[1:])], like.dtype)
            host = host_of(self.state.strategy.extended.devices[0])
            self._spare[key] = make_cell(host, like.dtype, row)
        return self._spare[key]

    def length_of(self, rounds: tf.Tensor) -> tf.Tensor:
        """Return how many steps the round has that comes after ``rounds`` rounds."""
        table = [self._rule.start] * bool(self._rule.start) + [*self._rule.table()]
        place = tf.minimum(tf.cast(rounds, tf.int32), len(table) - 1)
        return tf.gather(tf.constant(table, tf.float32), place)

    def _round(self) -> ReplicaRound:
        replica = replica_id()
        return ReplicaRound(self.state, replica, self.state.of_replica(replica))

    def _refusal(self) -> str:
        """Return why the model cannot be trained in rounds; empty if it can."""
        optimizers, own = optimizers_of(self.state.model), self.state.optimizer
        if len(optimizers) != 1:
            return (
                f"trains models with one optimizer, and {self.state.name!r} has {len(optimizers)}. "
                "Use sync=tfscale.sync.EveryStep(), the default"
            )
        if innermost(own) is not own:
            return (
                f"does not train with {type(own).__name__}: replicas that train alone "
                "would scale their losses differently. Compile with auto_scale_loss=False, and "
                'train in "mixed_bfloat16"; or use sync=tfscale.sync.EveryStep(), the default'
            )
        return ""

    # -- transitions, on a replica

    def _after_local_step(self, round: ReplicaRound, position: tf.Tensor) -> None:
        """Land what the last round has sent, and end the round, when these are due."""
        state = self.state
        if self._rule.delay:
            when(position == self._rule.delay, lambda: _on_all_replicas(self._rule.land, round))
        over = position >= self.length_of(round.rounds.read_value())
        if self._several_workers and not state.teams.spans_workers:
            over = tf.logical_or(over, state.has_batches.read() == 0)
        when(over, lambda: self._end(round))

    def _before_evaluation(self, round: ReplicaRound) -> None:
        flags = round.flags
        shows = tf.logical_and(flags.weights_differ.read(), tf.logical_not(flags.shown.read()))
        when(shows, lambda: _on_all_replicas(self._show, round))

    def _begins(self, round: ReplicaRound) -> tf.Tensor:
        """Return whether a round begins.

        With a rule that has ``reads_as``, a round also begins in the middle of a round if all
        replicas agree: a file has been read, and has given all replicas the same weights.
        """
        first = round.position.read_value() == 0 if self._rule.reads_as is None else True
        return tf.logical_and(
            first, ~round.flags.weights_differ.read() & ~round.flags.resumes.read()
        )

    def _end(self, round: ReplicaRound) -> None:
        if self._rule.start:  # the synchronous start is not a round
            when(round.rounds.read_value() > 0, lambda: _on_all_replicas(self._agree, round))
        else:
            _on_all_replicas(self._agree, round)
        round.rounds.assign_add(1)
        round.position.assign(0)

    def _agree(self, round: ReplicaRound) -> None:
        if self._several_workers:  # first: methods of the rule may depend on the number of steps
            self._exchange_counts(round)
        self._rule.end(round)
        round.average(self._statistics, "statistics")
        round.flags.weights_differ.assign(not self._rule.agrees)

    def _exchange_counts(self, round: ReplicaRound) -> None:
        """Exchange counts between workers.

        All learn whether any worker has batches left, and count as many steps as the worker that
        has made the most.
        """
        steps = own_copy(counter_of(self.state.optimizer))
        own = [tf.cast(x, tf.int32) for x in (self.state.has_batches.read(), steps.read_value())]
        every = round.gathered(tf.stack(own), "counts")
        steps.assign(tf.cast(tf.reduce_max(every[:, 1]), steps.dtype))
        round.steps.assign(round.optimizer_steps())
        if round.replica == 0:
            self.state.others_have_batches.assign(tf.reduce_any(every[:, 0] > 0))

    def _show(self, round: ReplicaRound) -> None:
        state, kept = self.state, self._rule.reads_as
        for variable, cell in zip(state.variables, round.flags.aside, strict=True):
            cell.assign(variable.values[round.replica].read_value())
        means = [v for v in state.variables if kept is None or state.place_of_trained(v) is None]
        round.average(means, "weights to evaluate")
        if kept is not None:
            for variable, value in zip(state.weights, round.values_of(kept), strict=True):
                if state.places.get(id(variable)) is not None:
                    variable.values[round.replica].assign(value)
        round.flags.shown.assign(True)

    def _put_back(self, round: ReplicaRound) -> None:
        for variable, cell in zip(self.state.variables, round.flags.aside, strict=True):
            own = variable.values[round.replica]
            own.assign(tf.ensure_shape(cell.read(), own.shape))
        round.flags.shown.assign(False)

    def _settle(self) -> None:
        round = self._round()
        when(round.flags.shown.read(), lambda: self._put_back(round))
        when(round.position.read_value() > 0, lambda: self._end(round))
        when(round.flags.weights_differ.read(), lambda: _on_all_replicas(self._rule.settle, round))
        _on_all_replicas(ReplicaRound.average_optimizer, round)
        round.flags.agree()

    # -- outside of replicas

    @property
    def skipped(self) -> int:
        """Number of batches that this process's replicas have left out."""
        return 0

    def is_apart(self) -> bool:
        """Return whether replicas have different weights."""
        return any(bool(flags.weights_differ.numpy()) for flags in self.state.flags.values())

    def close(self) -> None:
        """End the current round, and make all replicas identical."""
        if not any(bool(flags.optimizers_differ.numpy()) for flags in self.state.flags.values()):
            return
        strategy, settle = self.state.strategy, tf.autograph.experimental.do_not_convert
        if self._close is None:
            with strategy.scope(), ending_with_their_graphs():
                self._close = tf.function(
                    lambda: strategy.extended.call_for_each_replica(settle(self._settle)),
                    autograph=False,
                ).get_concrete_function()
        self._close()
        for flags in self.state.flags.values():
            flags.free()

    def value_of(self, variable: LocalWeight) -> Any:
        """Return the value that a variable reads as; None if all replicas have the same value."""
        flags, place = self.state.flags.get(0), self.state.places[id(variable)]
        if flags is None:
            return None
        if place is None:
            return _mean_of(variable) if flags.optimizers_differ.numpy() else None
        if not flags.weights_differ.numpy() or flags.shown.numpy():
            return None
        name = self._rule.reads_as
        kept = None if name is None else self.state.kept(name, variable)
        if kept is None:
            return _mean_of(variable)
        return tf.cast(read_from_outside(kept), variable.dtype)

    def assigned(self, variable: LocalWeight) -> None:
        """Make an assignment of a variable last beyond the next step and the end of the round.

        An evaluation may have put older weights aside, and the rule may keep older weights: both
        are updated.
        """
        state, place = self.state, self.state.places[id(variable)]
        if place is None or not tf.executing_eagerly():
            return
        for replica, flags in state.flags.items():
            if flags.shown.numpy():
                flags.aside[place].assign(variable.values[replica].read_value())
        every = state.flags.values()
        if not any(bool(flags.weights_differ.numpy() or flags.resumes.numpy()) for flags in every):
            return
        if state.place_of_trained(variable) is None:
            return
        for name in self._rule.kept_weights:
            kept = state.kept(name, variable)
            kept.assign(tf.cast(variable.values[0].read_value(), kept.dtype))
        for flags in every:
            flags.in_flight.assign(NOTHING_IN_FLIGHT)  # the update starts from older weights


def when(condition: Any, action: Callable[[], Any]) -> None:
    """Run the action in steps in which the condition holds."""

    def acted() -> tf.Operation:
        action()
        return tf.no_op()

    tf.cond(condition, acted, tf.no_op)


def _on_all_replicas(action: Callable[[Any], None], round: ReplicaRound) -> None:
    """Run an action that all replicas make together, outside of local steps."""
    with during(Step(is_reduced=True)):
        action(round)


def _begin_anew(round: ReplicaRound) -> None:
    """Make the next step the first step of a round: the optimizer has made steps without rounds."""
    round.position.assign(0)
    round.flags.resumes.assign(False)


def _mean_of(variable: LocalWeight) -> tf.Tensor:
    strategy = variable.distribute_strategy
    parts = PerReplica(tuple(v.read_value() for v in variable.values))
    total = strategy.reduce("SUM", parts, axis=None)
    return total / tf.cast(strategy.extended.number_of_replicas, total.dtype)
