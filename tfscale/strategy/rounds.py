"""Rounds, in which replicas train alone, of all models of a strategy."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfscale.bridge.hooks import END_OF_FIT, OPTIMIZER_BUILD
from tfscale.bridge.objects import native, trained_by
from tfscale.exchange.explain import Row
from tfscale.exchange.reducer import Reducer
from tfscale.exchange.state import ExchangeState
from tfscale.strategy.course import Course, optimizer_of
from tfscale.strategy.current import on_a_replica
from tfscale.strategy.groups import Groups
from tfscale.strategy.variables import LocalWeight
from tfscale.sync.rule import Rule

if TYPE_CHECKING:
    from tfscale.strategy.strategy import ScaleStrategy


class Rounds:
    """Those of all models of a strategy.

    Args:
        strategy: whose replicas train.
        rule: when they agree, and on what.
        reducer: computes means by the rule's policy.
        groups: of replicas that make their steps together; None if each makes its own.

    Attributes:
        agreeing: how many agree: replicas, or groups of them.
        makes_outer: whether a rule's outer optimizer is being made.
    """

    def __init__(
        self, strategy: ScaleStrategy, rule: Rule, reducer: Reducer, groups: Groups | None
    ) -> None:
        self.strategy = strategy
        self.rule = rule
        self.reducer = reducer
        self.groups = groups
        self.agreeing = reducer.exchange.ranks // (1 if groups is None else groups.size)
        self.makes_outer = False
        rule.check(self.agreeing)
        if unknown := [name for name in rule.in_shards if name not in rule.keeps]:
            raise ValueError(
                f"sync={rule!r} says that {unknown[0]!r} is in shards, and does not keep it: name "
                f"it in keeps, too, which is {rule.keeps!r}"
            )
        self._courses: weakref.WeakKeyDictionary[Any, Course] = weakref.WeakKeyDictionary()

    def of(self, model: Any) -> Course:
        """The course of a model, which begins with its first step."""
        course = self._courses.get(model)
        if course is None or course.optimizer is not optimizer_of(model):
            if course is not None and course.outside.is_apart():
                raise RuntimeError(
                    f"the model {model.name!r} has been compiled anew in the middle of a round, "
                    "while its replicas have different weights. Call fit, which ends that round "
                    "first; or compile the model after a fit, when its replicas agree"
                )
            course = self._courses[model] = Course(self, model)
        return course

    def begins(self, model: Any, callbacks: Sequence[Any], length: Mapping[str, Any]) -> None:
        """A ``fit`` of such a length begins, outside of replicas."""
        self._refuse_length(length)
        for callback in callbacks:
            self._refuse(callback)
        optimizer = optimizer_of(model)
        course = self._courses.get(model)
        if course is not None and course.optimizer is not optimizer:
            # A fit that was interrupted has left this, and then the model was compiled anew.
            END_OF_FIT.off(course.optimizer)
            course.close()
            model.test_function = model.predict_function = None  # they look at that course
        if optimizer is not None:
            END_OF_FIT.off(optimizer)  # a fit that was interrupted has left it
            END_OF_FIT.put(optimizer, functools.partial(self._end_of_fit, model))

    def _refuse(self, callback: Any) -> None:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            raise ValueError(
                f"SwapEMAWeights does not work with sync={self.rule!r}: it changes weights "
                "while replicas have different ones. Leave it out, and give the optimizer "
                "ema_overwrite_frequency=None: at the end of fit it takes the averages"
            )
        several = self.strategy.extended.number_of_workers > 1
        if several and isinstance(callback, keras.callbacks.TerminateOnNaN):
            raise ValueError(
                f"TerminateOnNaN does not work with sync={self.rule!r} on several workers: each "
                "sees the loss of its own batches, so one would stop and the others wait for it. "
                "Leave it out, and stop at the end of an epoch, when all are told the same loss"
            )

    def _refuse_length(self, length: Mapping[str, Any]) -> None:
        several = self.strategy.extended.number_of_workers > 1
        if not several or length["number of steps in an epoch"] is not None:
            return
        if self.groups and self.groups.size > len(self.strategy.extended.worker_devices):
            raise ValueError(
                f"sync={self.rule!r} has groups of several workers, which must have as many "
                "batches, and how many these data give is not known. Give fit steps_per_epoch"
            )
        if self.rule.start:
            raise ValueError(
                f"sync={self.rule!r} begins with synchronous steps, for which several workers must "
                "have as many batches, and how many these data give is not known. Give fit "
                "steps_per_epoch"
            )
        table = self.rule.table()
        if table[-1] < table[0] and length["number of epochs"] > 1:
            raise ValueError(
                f"sync={self.rule!r} has rounds that get shorter, so a worker that has no data "
                "left takes part in more of them in each epoch, and Keras gives it no more steps "
                "than in the first. Give fit steps_per_epoch; or call it once for each epoch"
            )

    def _end_of_fit(
        self, model: Any, finalize: Callable[..., None], optimizer: Any, variables: Any
    ) -> None:
        """In place of what Keras calls once at the end of ``fit``."""
        END_OF_FIT.off(optimizer)
        course = self._courses.get(model)
        if course is not None:
            course.close()
        finalize(optimizer, variables)

    def built(self, optimizer: Any, state: ExchangeState) -> None:
        """An optimizer of the scope has been built: its state is kept as the rule wants it, and it
        gets an outer one, if the rule has one.
        """
        state.in_shards = self.rule.in_shards
        state.weight_of = functools.partial(self._weight_of, optimizer)
        if not self.rule.has_outer or state.outer is not None:
            return
        state.make_outer = functools.partial(self._made_outer, optimizer)
        state.outer = state.make_outer()

    def _weight_of(self, optimizer: Any, name: str, place: str) -> Any:
        """The weight that reads as what is kept by that name, and is it once replicas agree."""
        if name != self.rule.reads_as or self.rule.agrees:
            return None
        return native(trained_by(optimizer)[int(place)])

    def _made_outer(self, optimizer: Any) -> Any:
        scope = contextlib.nullcontext() if on_a_replica() else self.strategy.scope()
        with tf.init_scope(), scope:
            self.makes_outer = True  # whose variables all replicas update alike
            try:
                outer = self.rule.make_outer()
                self.strategy.optimizers.discard(outer)
                OPTIMIZER_BUILD.off(outer)
                outer.build(trained_by(optimizer))
            finally:
                self.makes_outer = False
        return outer

    def sent_by_rules(self) -> list[Row]:
        """What the ends of rounds send besides what the reducer does."""
        return [row for course in self._courses.values() for row in course.outside.sent_by_rule()]

    @property
    def title(self) -> str:
        """What there is to explain; for people."""
        if self.groups is None:
            return "What is sent at the end of a round, and before the first one"
        return (
            f"What is sent within groups of {self.groups.size} replicas in each step, and between "
            "them at the end of a round"
        )

    def words(self) -> str:
        """When replicas agree next, what that costs, and how far they were apart; for people."""
        found = [words for course in self._courses.values() if (words := course.outside.words())]
        return " ".join([f"Replicas agree by {self.rule!r}.", *found])

    def figures(self) -> dict[str, float]:
        """Rounds that are over, how far weights were from their mean at the last one's end, and
        which share of their exchanges' time nobody waited for, if they go on behind steps.
        """
        begun = [c.outside for c in self._courses.values() if c.outside.has_begun]
        figures = {
            "rounds": sum(seen.ended()[1] for seen in begun),
            "drift": max((seen.drift() for seen in begun), default=0.0),
        }
        hidden = [share for seen in begun if (share := seen.hidden()) is not None]
        return figures | ({"hidden": min(hidden)} if hidden else {})

    def behind(self) -> tuple[float, float]:
        """Seconds waited for exchanges behind steps, and those that they took, of all models."""
        each = [c.outside.behind() for c in self._courses.values() if c.outside.has_begun]
        return sum(waited for waited, _ in each), sum(took for _, took in each)

    def before_evaluation(self, model: Any) -> None:
        """On a replica: an evaluation of a model begins, which may be a part of another one."""
        course = self._courses.get(model)
        if course is None or not course.outside.is_apart():
            course = self.of(model)
        course.before_evaluation()
        for other, course in list(self._courses.items()):
            if other is not model:
                course.before_evaluation()

    def as_seen(self, variable: LocalWeight) -> Any:
        """What a variable reads as outside of replicas; None if all have the same."""
        values = (course.outside.value(variable) for course in self._of_variable(variable))
        return next((value for value in values if value is not None), None)

    def is_apart(self, variable: LocalWeight) -> bool:
        """Whether replicas may have different values of it."""
        return any(course.outside.is_apart() for course in self._of_variable(variable))

    def assigned(self, variable: LocalWeight) -> None:
        """All replicas of a variable have been assigned, outside of replicas."""
        for course in self._of_variable(variable):
            course.outside.assigned(variable)

    def _of_variable(self, variable: LocalWeight) -> list[Course]:
        return [course for course in self._courses.values() if id(variable) in course.places]
