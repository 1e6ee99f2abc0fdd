"""State of one model's rounds, on this process's replicas."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import native, trained_by
from tfscale.collectives import Schedule
from tfscale.collectives.wires import LOSSLESS
from tfscale.exchange.background import BackgroundSums
from tfscale.exchange.packing import describe, place_of
from tfscale.exchange.reducer import Reducer
from tfscale.exchange.slots import COMMON, IN_SHARDS, Slot, Slots
from tfscale.native.cell import make_cell
from tfscale.native.group import host_of
from tfscale.strategy.teams import Teams
from tfscale.strategy.variables import LocalWeight
from tfscale.sync.rule import Rule

# Keys of the saved counters: see ``RoundState``.
POSITION, ROUNDS, STEPS = COUNTERS = ("position", "sync"), ("rounds", "sync"), ("steps", "sync")
_COUNTS = [Slot(*key) for key in COUNTERS]

NOTHING_IN_FLIGHT = -1


class RoundFlags:
    """State that one replica keeps between steps, and that no file holds.

    Args:
        copies: the replica's copies of the model's variables.
        bound: the rule's ``bound``.
        ranks: number of replicas.

    Attributes:
        weights_differ: whether replicas may have different weights.
        optimizers_differ: whether replicas' optimizers may keep different values.
        resumes: whether a file has been read in the middle of a round, and the round continues
            with the values of the file although all replicas have the same weights.
        shown: whether the weights to evaluate have replaced the replica's own weights.
        aside: copies of the replica's own weights meanwhile, one for each of the model's variables.
        in_flight: number of the part of the weights that is being summed in the background, or
            ``NOTHING_IN_FLIGHT``.
        waited: seconds that the replica has waited for sums in the background.
        took: seconds that sums in the background took.
        waited_last: seconds that the replica has waited for the last of these sums.
        waits: seconds that each rank has waited, as far as this replica has been told.
        staleness: how many steps late sums were, with a rule that has a ``bound``: the n-th number
            counts the gradients of weights that lacked n sums.
        drift: distance of the weights from the mean at the last synchronization.
    """

    def __init__(self, copies: Sequence[tf.Variable], bound: int = 0, ranks: int = 1) -> None:
        on_host = functools.partial(make_cell, host_of(copies[0].device))
        self.weights_differ, self.optimizers_differ, self.resumes, self.shown = (
            on_host(tf.bool, False) for _ in range(4)
        )
        self.in_flight = on_host(tf.int32, NOTHING_IN_FLIGHT)
        self.waited, self.took, self.waited_last = (on_host(tf.float64, 0) for _ in range(3))
        self.waits = on_host(tf.float64, [0.0] * ranks)
        self.staleness = on_host(tf.int64, [0] * (bound + 1))
        self.drift = on_host(tf.float32, 0)
        self.aside = [make_cell(copy.device, copy.dtype) for copy in copies]

    def agree(self) -> None:
        """Mark all replicas as identical."""
        for flag in (self.weights_differ, self.optimizers_differ, self.resumes):
            flag.assign(False)
        self.in_flight.assign(NOTHING_IN_FLIGHT)

    def free(self) -> None:
        """Free the weights that were put aside, outside of replicas."""
        self.shown.assign(False)
        for cell in self.aside:
            cell.clear()


class RoundState:
    """State of one model's rounds.

    Files hold, with the optimizer's state:

    - ``POSITION``: number of steps that are done in this round;
    - ``ROUNDS``: number of rounds that are over, with the synchronous start as the first;
    - ``STEPS``: number of the optimizer's steps after the last step of a round;
    - the values that the rule keeps for each weight, and the rule's outer optimizer.

    No file holds ``flags``, the exchange in flight, and the two cells on batches.

    Args:
        strategy: strategy whose replicas train in rounds.
        rule: rule that says when teams agree, and on what.
        reducer: reducer that computes means by the rule's policy.
        teams: teams of replicas.
        model: the model.
        outer: the rule's outer optimizer beside each optimizer of a model.

    Attributes:
        optimizer: the model's optimizer.
        name: the model's name.
        flags: flags of each replica of this process, by the replica's number in the process.
        places: position of each replicated variable, by the variable's id: its index among the
            model's variables, or None for a variable of the optimizer.
        has_batches: whether this worker has batches left: the number of its replicas that got one.
        others_have_batches: whether, as far as this worker knows, some worker has batches left.
        background: sums that run in the background while replicas make steps.
        mixtures: schedules that take turns in mixing weights at the ends of rounds; empty until
            they are traced.
        mixed_on: wire on which mixed weights are sent.
    """

    def __init__(
        self,
        strategy: Any,
        rule: Rule,
        reducer: Reducer,
        teams: Teams,
        model: Any,
        outer: Mapping[Any, Any],
    ) -> None:
        self.strategy, self.rule, self.reducer, self.teams = strategy, rule, reducer, teams
        self.optimizer, self.name = optimizer_of(model), model.name
        self._model, self._outer = weakref.ref(model), outer
        self.flags: dict[int, RoundFlags] = {}
        self.places: dict[int, int | None] = {}
        self.mixtures: list[Schedule] = []
        self.mixed_on = LOSSLESS
        self.background = BackgroundSums(reducer, self.label)
        host = host_of(strategy.extended.devices[0])
        self.has_batches = make_cell(host, tf.int64, 1)
        self.others_have_batches = make_cell(host, tf.bool, True)
        self._resumes = False

    @property
    def model(self) -> Any:
        """The model."""
        return self._model()

    @property
    def outer(self) -> Any:
        """The rule's outer optimizer."""
        return self._outer[self.optimizer]

    @property
    def label(self) -> str:
        """Owner of this model's collectives, as logs name it."""
        return f"rounds of {self.name}"

    def of_replica(self, replica: int) -> RoundFlags:
        """Return the flags of a replica, after making all variables that are missing."""
        self._prepare()
        if replica not in self.flags:
            copies = [v.values[replica] for v in self.variables]
            flags = RoundFlags(copies, self.rule.bound, self.reducer.team.size)
            flags.resumes.assign(self._resumes)
            self.flags[replica] = flags
        return self.flags[replica]

    def place_of_trained(self, variable: Any) -> int | None:
        """Return a variable's index among the trained weights; None if it is not trained."""
        return next((i for i, w in enumerate(self.weights) if w is variable), None)

    def kept(self, name: str, variable: LocalWeight) -> Any:
        """Return the value that the rule keeps for a weight; None if the weight is not trained."""
        place = self.place_of_trained(variable)
        if place is None:
            return None
        return self.saved.whole(name, place_of(self.optimizer, self.trained[place]))

    def begin_round(self) -> None:
        """Make the next step the first of a round, outside of replicas."""
        self.saved.whole(*POSITION).assign(0)

    def has_counters(self) -> bool:
        """Return whether steps and rounds are counted already."""
        return bool(self.flags) and self.saved.has(_COUNTS)

    def _prepare(self) -> None:
        """Make all variables that the rounds keep, before the first step."""
        if not self.model.built:
            raise ValueError(
                f"the model {self.name!r} is not built, and sync={self.rule!r} trains only models "
                "that are built. Call the model on a batch in the strategy's scope, or begin it "
                "with a keras.Input"
            )
        if not self.optimizer.built:
            with tf.init_scope():
                self.optimizer.build(self.model.trainable_variables)
        self.saved = Slots.of(self.optimizer, self.strategy)
        self.saved.observer = self._loaded
        self.trained = trained_by(self.optimizer)
        self.weights = [native(v) for v in self.trained]
        self.variables = _local(self.model.variables)
        self.of_optimizer = _local(self.optimizer.variables)
        self.places |= {id(v): None for v in self.of_optimizer}
        self.places |= {id(v): place for place, v in enumerate(self.variables)}
        wanted = [*_COUNTS, *slots_of(self.rule, self.optimizer)]
        begins = not self.flags and self._lacks_kept()
        if begins or not self.saved.has(wanted):
            context = tf.distribute.get_replica_context()
            context.merge_call(lambda strategy: self._make(wanted))
        elif not self.flags:
            self._resumes = self._can_resume()
        self.reducer.prepare(self.saved, self.optimizer, self.trained, self.weights)

    def _make(self, wanted: Sequence[Slot]) -> None:
        """Make the kept variables that do not exist yet.

        If only the counters exist, they come from a file with rounds of another rule: a round
        begins.
        """
        from_file = self.saved.has(_COUNTS)
        self.saved.prepare(wanted)
        self.saved.lacked = frozenset()
        if from_file:
            with tf.init_scope(), self.strategy.scope():
                self.begin_round()

    def _loaded(self) -> None:
        """Reset the flags after a file has been read: all replicas then have the same values."""
        begins = self._lacks_kept()
        self.saved.lacked = frozenset()
        if begins:
            self.begin_round()
        for flags in self.flags.values():
            flags.agree()
            flags.free()
            flags.resumes.assign(not begins and self._can_resume())

    def _can_resume(self) -> bool:
        """Return whether replicas continue from the kept values that a file has given.

        Then no round must begin from the weights alone.
        """
        return bool(self.rule.keeps) and not self.rule.agrees and self.rule.reads_as is None

    def _lacks_kept(self) -> bool:
        """Return whether the file that was read lacks values that the rule keeps."""
        return bool(self.saved.lacked & set(self.rule.keeps))


def slots_of(rule: Rule, optimizer: Any) -> list[Slot]:
    """Return the slots of what a rule keeps for each weight of an optimizer.

    Once replicas agree, a weight is equal to the kept value that it reads as meanwhile. All slots
    have one type, for the shards of all weights are sent together.
    """
    slots = []
    weights = [native(v) for v in trained_by(optimizer)]
    dtype = "float64" if any(weight.dtype == tf.float64 for weight in weights) else "float32"
    for name in rule.keeps:
        lives = IN_SHARDS if name in rule.in_shards else COMMON
        equals = name == rule.reads_as and not rule.agrees
        for v in trained_by(optimizer):
            weight = native(v) if equals and isinstance(native(v), LocalWeight) else None
            place, shape = place_of(optimizer, v), describe(v).shape
            slots.append(Slot(name, place, shape, lives, dtype, equals=weight))
    return slots


def optimizer_of(model: Any) -> Any:
    """Return a model's optimizer; None if the model was never compiled."""
    return getattr(model, "optimizer", None)


def _local(variables: Sequence[Any]) -> list[LocalWeight]:
    return [v for v in map(native, variables) if isinstance(v, LocalWeight)]
