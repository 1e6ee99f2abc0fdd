"""State machine of local training for one model: local steps, then a synchronization.

While a step of ``fit`` is traced, ``Course`` adds operations to the step, on every replica. These
operations count steps. They also run what the rule does at the beginning and the end of a round, in
branches that all other steps skip. Before a step of an evaluation, they load the weights to
evaluate. No Python code runs between these operations.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfscale.bridge.gradients import ending_with_their_graphs
from tfscale.bridge.objects import counter_of, innermost, native, optimizers_of, trained_by
from tfscale.bridge.tensorflow import own_copy, replica_id
from tfscale.collectives import Schedule
from tfscale.collectives.wires import LOSSLESS
from tfscale.compression.method import Kept
from tfscale.exchange.flights import Flights
from tfscale.exchange.reducer import describe, place_of
from tfscale.exchange.state import ExchangeState
from tfscale.exchange.trial import Cell
from tfscale.native.group import host_of
from tfscale.strategy.outside import Outside
from tfscale.strategy.remaining import Remaining
from tfscale.strategy.replica_round import (
    NONE,
    POSITION,
    ROUNDS,
    STEPS,
    Marks,
    ReplicaRound,
    together,
    when,
)
from tfscale.strategy.step import this_step
from tfscale.strategy.variables import LocalWeight

if TYPE_CHECKING:
    from tfscale.strategy.rounds import Rounds

_COUNT = Kept((), common=True)


class Course:
    """State machine of the rounds of one model.

    Attributes:
        optimizer: the model's optimizer.
        name: the model's name.
        agreeing: number of replicas, or of groups, that agree at the end of a round.
        group: exchange within the groups that make their steps together; None if each replica
            makes its own steps.
        places: position of each replicated variable, by the variable's id: its index among the
            model's variables, or None for a variable of the optimizer.
        marks: flags of each replica of this process, by the replica's number in the process.
        remaining: whether workers have batches left.
        flights: sums that run in the background while replicas make steps.
        mixtures: schedules that take turns in mixing weights at the ends of rounds; empty until
            they are traced.
        mixed_on: wire on which mixed weights are sent.
        outside: view of the rounds from outside of replicas.
    """

    def __init__(self, rounds: Rounds, model: Any) -> None:
        self.rule = rounds.rule
        self.optimizer = optimizer_of(model)
        self.agreeing = rounds.agreeing
        self.group = None if rounds.groups is None else rounds.groups.exchange
        self.places: dict[int, int | None] = {}
        self.reducer = rounds.reducer
        self._strategy = rounds.strategy
        self.name = model.name
        self._model = weakref.ref(model)
        self.marks: dict[int, Marks] = {}
        self.mixtures: list[Schedule] = []
        self.mixed_on = LOSSLESS
        self._statistics: list[Any] = []
        self._spare: dict[Any, Cell] = {}
        self._closing: Any = None
        self._goes_on = False
        self._table = rounds.rule.table()
        with self._on_host():
            self.remaining = Remaining()
        self.flights = Flights(rounds.reducer, self.label)
        self.outside = Outside(self)

    def _refusal(self) -> str:
        """Return why the model cannot be trained in rounds; empty if it can."""
        optimizers = optimizers_of(self._trained())
        if len(optimizers) != 1:
            return (
                f"trains models with one optimizer, and {self.name!r} has {len(optimizers)}. Use "
                "sync=tfscale.sync.EveryStep(), the default"
            )
        if innermost(self.optimizer) is not self.optimizer:
            return (
                f"does not train with {type(self.optimizer).__name__}: replicas that train alone "
                "would scale their losses differently. Compile with auto_scale_loss=False, and "
                'train in "mixed_bfloat16"; or use sync=tfscale.sync.EveryStep(), the default'
            )
        return ""

    # -- on a replica, while a step is traced

    def before_step(self) -> Any:
        """Begin a step of training, and return whether replicas make the step alone.

        The answer is True, False or a tensor, as in ``Step.alone``.
        """
        if refusal := self._refusal():
            raise ValueError(f"sync={self.rule!r} {refusal}")
        here = self._here()
        when(here.marks.shown.read(), here.put_back)
        when(here.steps.read_value() != here.count(), here.begin_anew)
        if self.rule.keeps:
            when(self._begins(here), lambda: self._by_rule(self.rule.begin, here))
        return True if not self.rule.start else here.rounds.read_value() > 0

    def _begins(self, here: ReplicaRound) -> tf.Tensor:
        """Return whether a round begins.

        With a rule that has ``reads_as``, a round also begins in the middle of a round if all
        replicas agree: a file has been read, and has given all replicas the same weights.
        """
        first = here.position.read_value() == 0 if self.rule.reads_as is None else True
        return tf.logical_and(first, here.agree & ~here.marks.goes_on.read())

    def after_step(self, statistics: Sequence[Any]) -> None:
        """Count a step of training, and end the round if this step is its last one.

        Args:
            statistics: variables that the step has assigned, except those of the optimizer.
        """
        self._statistics = list({id(v): v for v in [*self._statistics, *statistics]}.values())
        here = self._here()
        here.marks.diverge(this_step().alone)
        here.steps.assign(here.count())
        position = here.position.assign_add(1, read_value=True)
        if self.rule.delay:
            when(position == self.rule.delay, lambda: self._by_rule(self.rule.land, here))
        over = position >= self.steps_of(here.rounds.read_value())
        if self._strategy.extended.number_of_workers > 1 and not self._has_mates_elsewhere():
            over = tf.logical_or(over, self.remaining.is_none_here())
        when(over, lambda: self._end(here))

    def before_evaluation(self) -> None:
        """Load the weights to evaluate, before a step of an evaluation or a prediction."""
        if self._trained().built and not self._refusal():
            here = self._here()
            apart = tf.logical_and(here.marks.apart.read(), tf.logical_not(here.marks.shown.read()))
            when(apart, here.show)

    def _has_mates_elsewhere(self) -> bool:
        """Return whether replicas make steps together with replicas of other workers."""
        return self.group is not None and len(self.group.communicators) < self.group.ranks

    def spare_row(self, place: int, like: tf.Tensor) -> Cell:
        """Return the cell in which a replica keeps a row for batches in which it holds no rows.

        Args:
            place: position of the tensor among those of a batch.
            like: tensor that gives the row's type and shape.
        """
        key = (self._replica(), place, like.dtype, like.shape.rank)
        if key not in self._spare:
            shape = [1, *(size or 1 for size in like.shape[1:])]
            with self._on_host():
                cell = self._spare[key] = Cell(like.dtype)
                cell.assign(tf.zeros(shape, like.dtype))
        return self._spare[key]

    def steps_of(self, rounds: tf.Tensor) -> tf.Tensor:
        """Return how many steps the round has that comes after ``rounds`` rounds."""
        table = [self.rule.start, *self._table] if self.rule.start else self._table
        last = tf.constant(len(table) - 1, rounds.dtype)
        return tf.gather(
            tf.constant(table, tf.float32), tf.cast(tf.minimum(rounds, last), tf.int32)
        )

    def _end(self, here: ReplicaRound) -> None:
        if self.rule.start:  # the synchronous start is not a round
            when(here.rounds.read_value() > 0, lambda: self._agree(here))
        else:
            self._agree(here)
        here.rounds.assign_add(1)
        here.position.assign(0)

    def _agree(self, here: ReplicaRound) -> None:
        self._by_rule(self.rule.end, here)
        here.average(self._statistics, "statistics")
        if self._strategy.extended.number_of_workers > 1:
            self._agree_on_counts(here)
        here.marks.converge(self.rule)

    def _agree_on_counts(self, here: ReplicaRound) -> None:
        """Exchange counts between workers.

        All learn whether any worker has batches left, and count as many steps as the worker that
        has made the most.
        """
        iterations = own_copy(counter_of(self.optimizer))
        own = [self.remaining.here(), tf.cast(iterations.read_value(), tf.int32)]
        every = here.gathered(tf.stack(own)[tf.newaxis], "counts")
        iterations.assign(tf.cast(tf.reduce_max(every[:, 1]), iterations.dtype))
        here.steps.assign(here.count())
        if here.replica == 0:
            self.remaining.agree(every[:, 0])

    def _by_rule(self, what: Callable[[Any], None], here: ReplicaRound) -> None:
        with together():
            what(here)

    def _here(self) -> ReplicaRound:
        self._prepare()
        replica = self._replica()
        if replica not in self.marks:
            self.marks[replica] = Marks(self.variables, replica)
            self.marks[replica].goes_on.assign(self._goes_on)
        return ReplicaRound(self, replica, self.marks[replica])

    def _trained(self) -> Any:
        return self._model()

    @staticmethod
    def _replica() -> int:
        return replica_id(tf.distribute.get_replica_context())

    def _prepare(self) -> None:
        """Make all variables that the rounds keep, before the first step."""
        model = self._trained()
        if not model.built:
            raise ValueError(
                f"sync={self.rule!r} trains models that are built, and {self.name!r} is not: call "
                "it on a batch in the strategy's scope, or give it a keras.Input"
            )
        if not self.optimizer.built:
            with tf.init_scope():
                self.optimizer.build(model.trainable_variables)
        self.state = ExchangeState.of(self.optimizer, self._strategy)
        self.trained = trained_by(self.optimizer)
        self.weights = [native(v) for v in self.trained]
        self.variables = _local(model.variables)
        self.of_optimizer = _local(self.optimizer.variables)
        self.places |= {id(v): None for v in self.of_optimizer}
        self.places |= {id(v): place for place, v in enumerate(self.variables)}
        wanted = {POSITION: _COUNT, ROUNDS: _COUNT, STEPS: _COUNT}
        for v in self.trained:
            kept = Kept(describe(v).shape, common=True)
            wanted |= {(name, place_of(self.optimizer, v)): kept for name in self.rule.keeps}
        self.state.after_loading = self._loaded
        begins = not self.marks and self._lacks_what_is_kept()
        if begins or not self.state.has(wanted, False):
            context = tf.distribute.get_replica_context()
            context.merge_call(lambda strategy: self._make(wanted))
        elif not self.marks:
            self._goes_on = self._is_from_file()
        self.reducer.prepare(self.state, self.optimizer, self.trained, self.weights)

    def _make(self, wanted: Mapping[tuple[str, str], Kept]) -> None:
        """Make the kept variables that do not exist yet.

        If only the counts exist, they come from a file with rounds of another rule: a round begins.
        """
        counts = {key: kept for key, kept in wanted.items() if key in (POSITION, ROUNDS, STEPS)}
        from_file = self.state.has(counts, False)
        self.state.prepare(wanted, False)
        self.state.anew = frozenset()
        if from_file:
            with tf.init_scope(), self._strategy.scope():
                self._begin_round()

    def _is_from_file(self) -> bool:
        """Return whether replicas continue from weights and kept values that a file has given.

        Then no round must begin from the weights alone.
        """
        rule = self.rule
        return bool(rule.keeps) and not rule.agrees and rule.reads_as is None

    def _lacks_what_is_kept(self) -> bool:
        """Return whether the file that was read lacks values that the rule keeps."""
        return bool(self.state.anew & set(self.rule.keeps))

    def _begin_round(self) -> None:
        self.state.whole(*POSITION).assign(0)

    # -- outside of replicas

    def _loaded(self) -> None:
        """Reset the flags after a file has been read: all replicas then have the same values."""
        begins = self._lacks_what_is_kept()
        self.state.anew = frozenset()
        if begins:
            self._begin_round()
        for marks in self.marks.values():
            marks.agree()
            marks.free()
            marks.goes_on.assign(not begins and self._is_from_file())

    def has_counts(self) -> bool:
        """Return whether steps and rounds are counted already."""
        return self.state.has({POSITION: _COUNT, ROUNDS: _COUNT}, False)

    def close(self) -> None:
        """End the current round, and make all replicas identical."""
        if not self.outside.is_spread():
            return
        if self._closing is None:

            @tf.autograph.experimental.do_not_convert
            def on_replica() -> None:
                self._close_here()

            def closing() -> None:
                with ending_with_their_graphs():
                    self._strategy.extended.call_for_each_replica(on_replica)

            with self._strategy.scope():
                self._closing = tf.function(closing, autograph=False).get_concrete_function()
        self._closing()
        for marks in self.marks.values():
            marks.free()

    def _close_here(self) -> None:
        here = self._here()
        when(here.marks.shown.read(), here.put_back)
        when(here.position.read_value() > 0, lambda: self._end(here))
        when(here.marks.apart.read(), lambda: self._by_rule(self.rule.settle, here))
        self._by_rule(lambda _: here.average_optimizer(), here)
        here.marks.agree()

    def reads_as(self, variable: LocalWeight) -> Any:
        """Return the kept value that a weight reads as; None if it reads as the replicas' mean."""
        return None if self.rule.reads_as is None else self._kept(self.rule.reads_as, variable)

    def assigned(self, variable: LocalWeight) -> None:
        """Update the rule's kept weights after a weight has been assigned in mid-round."""
        for name in self.rule.kept_weights:
            kept = self._kept(name, variable)
            if kept is not None:
                kept.assign(tf.cast(variable.values[0].read_value(), kept.dtype))
        if self.place_of_trained(variable) is None:
            return
        for marks in self.marks.values():
            marks.in_flight.assign(NONE)  # the pending update starts from older weights

    def place_of_trained(self, variable: Any) -> int | None:
        """Return a variable's index among the trained weights; None if it is not trained."""
        return next((i for i, w in enumerate(self.weights) if w is variable), None)

    def _kept(self, name: str, variable: LocalWeight) -> Any:
        place = self.place_of_trained(variable)
        if place is None:
            return None
        return self.state.whole(name, place_of(self.optimizer, self.trained[place]))

    @contextlib.contextmanager
    def _on_host(self) -> Iterator[None]:
        with tf.init_scope(), tf.device(host_of(self._strategy.extended.devices[0])):
            yield

    @property
    def label(self) -> str:
        """Owner of this model's collectives, as logs name it."""
        return f"rounds of {self.name}"


def optimizer_of(model: Any) -> Any:
    """Return a model's optimizer; None if the model was never compiled."""
    return getattr(model, "optimizer", None)


def _local(variables: Sequence[Any]) -> list[LocalWeight]:
    return [v for v in map(native, variables) if isinstance(v, LocalWeight)]
