"""View of a model's rounds from outside of replicas, between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfscale.bridge.tensorflow import PerReplica, read_from_outside
from tfscale.exchange.explain import Row, row_of_mixtures, row_of_shards, rows
from tfscale.exchange.packing import describe
from tfscale.native.bucket import BucketId
from tfscale.strategy.replica_round import MIXED, POSITION, ROUNDS, SHARDS, SUM_INTO
from tfscale.strategy.variables import LocalWeight

if TYPE_CHECKING:
    from tfscale.strategy.course import Course


class Outside:
    """View of a model's rounds: values of variables, counts of steps, distances of replicas."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._marks = course.marks

    def is_apart(self) -> bool:
        """Return whether replicas have different weights."""
        return any(bool(marks.apart.numpy()) for marks in self._marks.values())

    def is_spread(self) -> bool:
        """Return whether any values of replicas may differ, weights or values of optimizers."""
        return any(bool(marks.spread.numpy()) for marks in self._marks.values())

    def value(self, variable: LocalWeight) -> Any:
        """Return the value that a variable reads as; None if all replicas have the same value."""
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
        """Make an assignment of a variable last beyond the next step and the end of the round.

        An evaluation may have put older weights aside, and the rule may keep older weights: both
        are updated.
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
        """Return how many steps of this round are done, and how many rounds are done."""
        whole = self._course.state.whole
        done, rounds = (int(whole(*which).numpy()) for which in (POSITION, ROUNDS))
        if self._course.rule.start:
            rounds = max(0, rounds - 1)  # the synchronous start is not a round
        return done, rounds

    def drift(self) -> float:
        """Return the largest distance of weights from their mean, of this process's replicas."""
        return max(float(marks.drift.numpy()) for marks in self._marks.values())

    def behind(self) -> tuple[float, float]:
        """Return the seconds that this process's slowest replica waited for background exchanges,
        and the seconds that these exchanges took.
        """
        each = [(float(m.waited.numpy()), float(m.took.numpy())) for m in self._marks.values()]
        return max(each)

    def hidden(self) -> float | None:
        """Return the share of the background exchanges' time during which the replica did not wait;
        None if no exchange ran in the background.
        """
        waited, took = self.behind()
        return 1 - waited / took if took else None

    def sent_by_rule(self) -> list[Row]:
        """Return rows of what a rule sends at the end of a round, besides the reducer's buckets."""
        course = self._course
        if not self.has_begun:
            return []
        team, weights = course.reducer.team, [describe(v) for v in course.trained]
        if course.mixtures:
            bucket = BucketId(MIXED, course.label)
            return [row_of_mixtures(team, bucket, weights, course.mixtures, course.mixed_on)]
        return [
            row_of_shards(team, BucketId(name.format(kept), course.label), weights)
            for kept in course.rule.in_shards
            for name in (SHARDS, SUM_INTO)
        ]

    def words(self) -> str:
        """Return a text on the model's rounds and the next synchronization, for people.

        The text is empty before the first step.
        """
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
