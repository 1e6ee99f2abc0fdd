"""What one sees of a model's rounds outside of replicas, between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfscale.bridge.tensorflow import PerReplica, read_from_outside
from tfscale.exchange.explain import Row, row_of_mixtures, row_of_shards, rows
from tfscale.exchange.reducer import describe
from tfscale.ops.bucket import BucketId
from tfscale.strategy.replica_round import MIXED, POSITION, ROUNDS, SHARDS, SUM_INTO
from tfscale.strategy.variables import LocalWeight

if TYPE_CHECKING:
    from tfscale.strategy.course import Course


class Outside:
    """The values of its variables, how far its rounds are, and how far replicas were apart."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._marks = course.marks

    def is_apart(self) -> bool:
        """Whether replicas have different weights."""
        return any(bool(marks.apart.numpy()) for marks in self._marks.values())

    def is_spread(self) -> bool:
        """Whether they may differ in anything."""
        return any(bool(marks.spread.numpy()) for marks in self._marks.values())

    def value(self, variable: LocalWeight) -> Any:
        """What a variable reads as; None if all replicas have the same value."""
        marks = self._marks.get(0)
        place = self._course.places[id(variable)]
        if marks is None:
            return None
        if place is None:
            return self._mean_of(variable) if marks.spread.numpy() else None
        if not marks.apart.numpy() or marks.shown.numpy():
            return None
        kept = self._course.reads_as(variable)
        if kept is None:
            return self._mean_of(variable)
        return tf.cast(read_from_outside(kept), variable.dtype)

    def _mean_of(self, variable: LocalWeight) -> tf.Tensor:
        strategy = variable.distribute_strategy
        parts = PerReplica(tuple(v.read_value() for v in variable.values))
        total = strategy.reduce("SUM", parts, axis=None)
        return total / tf.cast(strategy.extended.number_of_replicas, total.dtype)

    def assigned(self, variable: LocalWeight) -> None:
        """A step of training is not to undo that, nor the end of the round.

        Though an evaluation has put weights aside, and though the rule keeps others.
        """
        place = self._course.places[id(variable)]
        if place is None or not tf.executing_eagerly():
            return
        for replica, marks in self._marks.items():
            if marks.shown.numpy():
                marks.aside[place].assign(variable.values[replica].read_value())
        if self.is_apart() or any(bool(marks.goes_on.numpy()) for marks in self._marks.values()):
            self._course.assigned(variable)

    @property
    def has_begun(self) -> bool:
        """Whether a step of training has been traced."""
        return bool(self._marks) and self._course.has_counts()

    def ended(self) -> tuple[int, int]:
        """How many steps of this round are done, and how many rounds."""
        whole = self._course.state.whole
        done, rounds = (int(whole(*which).numpy()) for which in (POSITION, ROUNDS))
        if self._course.rule.start:
            rounds = max(0, rounds - 1)  # the synchronous start is none
        return done, rounds

    def drift(self) -> float:
        """Of this process's replicas, the largest distance of weights from their mean."""
        return max(float(marks.drift.numpy()) for marks in self._marks.values())

    def behind(self) -> tuple[float, float]:
        """Seconds that this process's slowest replica has waited for exchanges that go on behind
        steps, and that these have taken.
        """
        each = [(float(m.waited.numpy()), float(m.took.numpy())) for m in self._marks.values()]
        return max(each)

    def hidden(self) -> float | None:
        """Which share of that time nobody waited for; None if none has gone on behind steps."""
        waited, took = self.behind()
        return 1 - waited / took if took else None

    def sent_by_rule(self) -> list[Row]:
        """What the end of a round sends besides what the reducer does."""
        course = self._course
        if not self.has_begun:
            return []
        exchange, weights = course.reducer.exchange, [describe(v) for v in course.trained]
        if course.mixtures:
            bucket = BucketId(MIXED, course.label)
            return [row_of_mixtures(exchange, bucket, weights, course.mixtures, course.mixed_on)]
        return [
            row_of_shards(exchange, BucketId(name.format(kept), course.label), weights)
            for kept in course.rule.in_shards
            for name in (SHARDS, SUM_INTO)
        ]

    def words(self) -> str:
        """Of this model's next agreement; nothing before its first step."""
        if not self.has_begun:
            return ""
        course = self._course
        done, rounds = self.ended()
        counted = float(course.state.whole(*ROUNDS).numpy())
        left = int(course.steps_of(tf.constant(counted, tf.float32))) - done
        own = self.sent_by_rule() or [
            row for row in rows(course.reducer) if row.bucket.owner == course.label
        ]
        size, seconds = sum(row.bytes for row in own), sum(row.predicted for row in own)
        words = f"{course.name!r} has ended {rounds} rounds, and ends the next in {left} steps"
        if own:
            parts = course.flights.parts
            what = "that mixes" if course.mixtures else "that sums"
            words += f"; {what if parts < 2 else f'{parts} in turn sum'} {size:,} bytes"
            words += f", in {1000 * seconds:.2f} ms by the model" if seconds else ""
        if (hidden := self.hidden()) is not None:
            words += f", of whose time {100 * hidden:.0f} % went by behind steps"
        if drift := self.drift():
            centre = course.rule.reads_as
            from_what = centre if centre in course.rule.in_shards else "mean"
            words += f". At the last end weights were up to {drift:.3g} from their {from_what}"
        return f"{words}."
