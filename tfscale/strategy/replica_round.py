"""Round of one replica: its flags, and its exchanges with the other replicas."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfscale.bridge.objects import counter_of
from tfscale.bridge.tensorflow import own_copy
from tfscale.collectives import Schedule, is_doubly_stochastic
from tfscale.collectives.wires import LOSSLESS
from tfscale.exchange import shards
from tfscale.exchange.reducer import place_of
from tfscale.exchange.trial import Cell
from tfscale.native.bucket import BucketId
from tfscale.native.group import host_of
from tfscale.strategy.step import Step, during
from tfscale.sync.hierarchical import MIXES_REPLICAS
from tfscale.sync.rule import Rule

if TYPE_CHECKING:
    from tfscale.strategy.course import Course

# Variables that are kept besides those of a rule: the steps of this round, the rounds that are
# over, and the optimizer's count of steps after the last step. If the optimizer has made other
# steps since, in a training without rounds, a new round begins.
POSITION, ROUNDS, STEPS = ("position", "sync"), ("rounds", "sync"), ("steps", "sync")


# Names of exchanges in logs.
MIXED, SHARDS, SUM_INTO = "weights to mix", "shards of the {}", "sum into the {}"
NONE = -1  # no part of the weights is in flight


class Marks:
    """State that one replica keeps between steps; checkpoints do not save it.

    Attributes:
        apart: whether replicas may have different weights.
        spread: whether replicas' optimizers may keep different values.
        goes_on: whether a file has been read in the middle of a round, and the round continues
            with the values of the file although all replicas have the same weights.
        shown: whether the weights to evaluate have replaced the replica's own weights.
        aside: copies of the replica's own weights meanwhile, one for each of the model's
            variables.
        in_flight: number of the part of the weights that is being summed, or ``NONE``.
        waited: seconds that the replica has waited for sums in the background.
        took: seconds that sums in the background took.
        drift: distance of the weights from the mean at the last synchronization.
    """

    def __init__(self, variables: Sequence[Any], replica: int) -> None:
        own = [variable.values[replica] for variable in variables]
        with tf.init_scope():
            self.aside = [_cell(v) for v in own]
            with tf.device(host_of(own[0].device)):
                flags = [Cell(tf.bool) for _ in range(4)]
                self.apart, self.spread, self.goes_on, self.shown = flags
                self.drift = Cell(tf.float32)
                self.drift.assign(0.0)
                self.waited, self.took = Cell(tf.float64), Cell(tf.float64)
                self.waited.assign(0.0)
                self.took.assign(0.0)
                self.in_flight = Cell(tf.int32)
                self.in_flight.assign(NONE)
                for flag in flags:
                    flag.assign(False)

    def diverge(self, alone: Any) -> None:
        """Note that a step has been made: if made alone, replicas may differ."""
        for flag in (self.apart, self.spread):
            flag.assign(True if alone is True else tf.logical_or(flag.read(), alone))

    def converge(self, rule: Rule) -> None:
        """Note that a round is over: weights are the same if the rule makes replicas agree."""
        self.apart.assign(not rule.agrees)

    def free(self) -> None:
        """Free the weights that were put aside, outside of replicas, when training ends."""
        self.shown.assign(False)
        for cell in self.aside:
            cell.clear()

    def agree(self) -> None:
        """Mark all replicas as identical."""
        for flag in (self.apart, self.spread, self.goes_on):
            flag.assign(False)
        self.in_flight.assign(NONE)


def _cell(variable: tf.Variable) -> Cell:
    with tf.device(variable.device):
        return Cell(variable.dtype)


class ReplicaRound:
    """``Round`` of one replica, as its rule uses it."""

    def __init__(self, course: Course, replica: int, marks: Marks) -> None:
        self.replica, self.marks = replica, marks
        self.weights = [v.values[replica] for v in course.weights]
        self.trained = course.trained
        self._course = course
        self._reducer = course.reducer
        self._exchange = self._reducer.exchange
        self.replicas = course.agreeing
        self.position = course.state.kept(*POSITION, replica)
        self.rounds = course.state.kept(*ROUNDS, replica)
        self.steps = course.state.kept(*STEPS, replica)
        self._part = 0

    @property
    def agree(self) -> tf.Tensor:
        """Whether all replicas have the same weights, as a tensor."""
        return tf.logical_not(self.marks.apart.read())

    def begin_anew(self) -> None:
        """Make the next step the first step of a round."""
        self.position.assign(0)
        self.marks.goes_on.assign(False)

    def count(self) -> tf.Tensor:
        """Return the number of steps that the optimizer has made."""
        counter = own_copy(counter_of(self._course.optimizer))
        return tf.cast(counter.read_value(), self.steps.dtype)

    @property
    def number(self) -> tf.Tensor:
        return tf.cast(self.rounds.read_value(), tf.int32)

    @property
    def in_flight(self) -> tf.Tensor:
        return tf.ensure_shape(self.marks.in_flight.read(), [])

    def part(self, number: int, places: Sequence[int]) -> ReplicaRound:
        part = copy.copy(self)
        part.weights = [self.weights[place] for place in places]
        part.trained = [self.trained[place] for place in places]
        part._part = number
        return part

    def send(self, values: Sequence[tf.Tensor]) -> None:
        course = self._course
        course.flights.begin(self._ways, values, self.trained, course.optimizer, course.state)
        self.marks.in_flight.assign(self._part)

    def take(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        course = self._course
        self.marks.in_flight.assign(NONE)  # on all replicas, even if the exchange fails
        sums, waited, took = course.flights.take(
            self._ways, self.trained, course.optimizer, course.state
        )
        self.marks.waited.assign(self.marks.waited.read() + waited)
        self.marks.took.assign(self.marks.took.read() + took)
        means = [
            tf.cast(total, value.dtype) / tf.cast(self._exchange.ranks, value.dtype)
            for total, value in zip(sums, values, strict=True)
        ]
        self._note_drift(values, means)
        return means

    @property
    def _ways(self) -> str:
        return f"ways of fragment {self._part}"

    def kept(self, name: str) -> list[tf.Tensor]:
        values = self._values_of(name)
        if name in self._course.rule.in_shards and name == self._course.rule.reads_as:
            self._note_drift([weight.read_value() for weight in self.weights], values)
        return values

    def _values_of(self, name: str) -> list[tf.Tensor]:
        own = [variable.read_value() for variable in self._kept(name)]
        kept = self._joined(own, name) if name in self._course.rule.in_shards else own
        return [tf.cast(x, weight.dtype) for x, weight in zip(kept, self.weights, strict=True)]

    def keep(self, name: str, values: Sequence[tf.Tensor]) -> None:
        if name in self._course.rule.in_shards:
            ranks, rank = self._exchange.ranks, self._exchange.communicators[self.replica].rank
            values = [shards.split(value, ranks)[rank] for value in values]
        for variable, value in zip(self._kept(name), values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))

    def add(self, name: str, values: Sequence[tf.Tensor]) -> None:
        if name not in self._course.rule.in_shards:
            raise ValueError(
                f"sync={self._course.rule!r} adds to {name!r}, which is not in shards. Name it in "
                "the rule's in_shards; or keep what is the same on all replicas, such as a mean"
            )
        own = self._kept(name)
        total = self._summed_shards([tf.cast(value, tf.float32) for value in values], name)
        members = self._exchange.ranks // self.replicas  # replicas of a group add equal values
        for variable, shard in zip(own, total, strict=True):
            variable.assign_add(shard / members)

    def _joined(self, own: Sequence[tf.Tensor], what: str) -> list[tf.Tensor]:
        """Gather the shards of all replicas, and return the whole tensors."""
        every = self.gathered(tf.concat(own, 0)[tf.newaxis], SHARDS.format(what))
        parts = tf.split(every, [shard.shape[0] for shard in own], axis=1)
        return [shards.join(x, w.shape) for x, w in zip(parts, self.weights, strict=True)]

    def _summed_shards(self, values: Sequence[tf.Tensor], what: str) -> list[tf.Tensor]:
        """Sum values over all replicas, and return this replica's shards of the sums."""
        name = BucketId(SUM_INTO.format(what), self._course.label)
        rows = [shards.split(value, self._exchange.ranks) for value in values]
        (own,) = self._exchange.together(
            lambda replica, x: [self._exchange.scattered(replica, x[0], name)],
            [tf.concat(rows, 1)],
        )
        return list(tf.split(own[0], [row.shape[1] for row in rows]))

    def _kept(self, name: str) -> list[tf.Variable]:
        state, course = self._course.state, self._course
        places = [place_of(course.optimizer, v) for v in self.trained]
        return [state.kept(name, place, self.replica) for place in places]

    def mean(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        course = self._course
        sums = self._reducer.reduce(
            list(values), self.trained, course.optimizer, course.state, label=course.label
        )
        means = [total / tf.cast(self._exchange.ranks, total.dtype) for total in sums]
        self._note_drift(values, means)
        return means

    def mix(
        self, values: Sequence[tf.Tensor], mixtures: Sequence[Schedule], wire: str = LOSSLESS
    ) -> list[tf.Tensor]:
        if self._course.group is not None:
            raise ValueError(MIXES_REPLICAS.format(f"sync={self._course.rule!r}"))
        self._course.mixtures, self._course.mixed_on = list(mixtures), wire
        if not all(map(is_doubly_stochastic, mixtures)):
            raise ValueError(
                f"sync={self._course.rule!r} mixes by a mixture that is not doubly stochastic, "
                "which would change the mean of all weights. Let each replica send to as many as "
                "send to it"
            )
        turn = tf.cast(self.rounds.read_value(), tf.int32) % len(mixtures)
        every = [functools.partial(self._mixed, list(values), one, wire) for one in mixtures]
        mixed = list(tf.switch_case(turn, every))
        self._note_drift(values, mixed)
        return mixed

    def _mixed(self, values: list[tf.Tensor], mixture: Schedule, wire: str) -> list[tf.Tensor]:
        exchange, seed = self._exchange, self.rounds.read_value()
        name = BucketId(MIXED, self._course.label)
        return exchange.together(
            lambda replica, own: exchange.mixed(replica, own, mixture, name, wire, seed), values
        )

    def _note_drift(self, values: Sequence[tf.Tensor], means: Sequence[tf.Tensor]) -> None:
        apart = [value - mean for value, mean in zip(values, means, strict=True)]
        self.marks.drift.assign(tf.linalg.global_norm([tf.cast(x, tf.float32) for x in apart]))

    def average_optimizer(self) -> None:
        self.average(self._course.of_optimizer, "the optimizer's")

    def average(self, variables: Sequence[Any], what: str) -> None:
        """Replace variables by their means over all replicas."""
        own = [v.values[self.replica] for v in variables]
        values = [variable.read_value() for variable in own]
        for variable, mean in zip(own, self._means(values, what), strict=True):
            variable.assign(mean)

    def _means(self, own: list[tf.Tensor], what: str) -> list[tf.Tensor]:
        if not own:
            return []
        name = BucketId(what, self._course.label)
        sums = self._exchange.together(
            lambda replica, tensors: self._exchange.sum_all(replica, tensors, name), own
        )
        return [total / tf.cast(self._exchange.ranks, total.dtype) for total in sums]

    def gathered(self, row: tf.Tensor, what: str) -> tf.Tensor:
        """Gather the rows of all replicas."""
        name = BucketId(what, self._course.label)
        (every,) = self._exchange.together(
            lambda replica, own: [self._exchange.gathered(replica, own[0], name)], [row]
        )
        return every

    def outer_step(self, gradients: Sequence[tf.Tensor], counts: bool = True) -> None:
        outer = self._course.state.outer
        counter = own_copy(counter_of(outer))
        outer.apply(list(gradients), self.trained)
        if not counts:
            counter.assign_sub(1)

    def show(self) -> None:
        """Put the replica's own weights aside, and load the weights to evaluate."""
        course = self._course
        own = [v.values[self.replica] for v in course.variables]
        for variable, cell in zip(own, self.marks.aside, strict=True):
            cell.assign(variable.read_value())
        averaged = [v for v in course.variables if course.reads_as(v) is None]
        with together():
            self.average(averaged, "weights to evaluate")
            if course.rule.reads_as is not None:
                self._take_kept(course.rule.reads_as)
        self.marks.shown.assign(True)

    def _take_kept(self, name: str) -> None:
        """Replace the model's weights by the kept values of that name."""
        for variable, value in zip(self._course.weights, self._values_of(name), strict=True):
            if self._course.places.get(id(variable)) is not None:
                variable.values[self.replica].assign(value)

    def put_back(self) -> None:
        """Restore the weights that were put aside."""
        for variable, cell in zip(self._course.variables, self.marks.aside, strict=True):
            own = variable.values[self.replica]
            own.assign(tf.ensure_shape(cell.read(), own.shape))
        self.marks.shown.assign(False)


def together() -> AbstractContextManager[Step]:
    """Return a context for operations that all replicas make together, outside of local steps."""
    return during(Step(is_reduced=True))


def when(condition: Any, action: Callable[[], Any]) -> None:
    """Run the action in steps in which the condition holds."""

    def acted() -> tf.Operation:
        action()
        return tf.no_op()

    tf.cond(condition, acted, tf.no_op)
