"""Rounds of local training, for all models of a strategy."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.hooks import END_OF_FIT, OPTIMIZER_BUILD
from tfscale.bridge.objects import native, trained_by
from tfscale.exchange.explain import Row
from tfscale.exchange.reducer import Reducer
from tfscale.exchange.state import ExchangeState
from tfscale.strategy.course import Course, optimizer_of
from tfscale.strategy.groups import Groups
from tfscale.strategy.protocols import Strategy
from tfscale.strategy.step import on_a_replica
from tfscale.strategy.variables import LocalWeight
from tfscale.sync.rule import Rule


class Rounds:
    """Rounds of all models of a strategy.

    Args:
        strategy: strategy whose replicas train in rounds.
        rule: rule that says when replicas agree, and on what.
        reducer: reducer that computes means by the rule's policy.
        groups: groups of replicas that make their steps together; None if each replica makes its
            own steps.

    Attributes:
        agreeing: number of replicas, or of groups, that agree at the end of a round.
        makes_outer: whether a rule's outer optimizer is being made.
    """

    def __init__(
        self, strategy: Strategy, rule: Rule, reducer: Reducer, groups: Groups | None
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
        """Return the ``Course`` of a model; the first call makes it."""
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
        """Prepare for a ``fit`` that begins, outside of replicas.

        Args:
            model: model that ``fit`` trains.
            callbacks: callbacks of this ``fit``.
            length: numbers of epochs and steps of this ``fit``, by name.

        Raises:
            ValueError: a callback, or the length, does not work with the rule.
        """
        self._refuse_length(length)
        for callback in callbacks:
            self._refuse(callback)
        optimizer = optimizer_of(model)
        course = self._courses.get(model)
        if course is not None and course.optimizer is not optimizer:
            # A fit was interrupted, so its hook is still there; then the model was compiled anew.
            END_OF_FIT.off(course.optimizer)
            course.close()
            model.test_function = model.predict_function = None  # they use the old course
        if optimizer is not None:
            END_OF_FIT.off(optimizer)  # an interrupted fit may have left its hook
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
        """End the model's round at the end of ``fit``, then finalize its variables.

        This replaces the method that Keras calls once at the end of ``fit``.
        """
        END_OF_FIT.off(optimizer)
        course = self._courses.get(model)
        if course is not None:
            course.close()
        finalize(optimizer, variables)

    def built(self, optimizer: Any, state: ExchangeState) -> None:
        """Set up the state of an optimizer that has been built in the scope.

        The rule says which values are kept in shards, and whether there is an outer optimizer.
        """
        state.in_shards = self.rule.in_shards
        state.weight_of = functools.partial(self._weight_of, optimizer)
        if not self.rule.has_outer or state.outer is not None:
            return
        state.make_outer = functools.partial(self._made_outer, optimizer)
        state.outer = state.make_outer()

    def _weight_of(self, optimizer: Any, name: str, place: str) -> Any:
        """Return the weight that reads as the kept value ``name``; None if there is no such weight.

        Once replicas agree, the weight is equal to the kept value.
        """
        if name != self.rule.reads_as or self.rule.agrees:
            return None
        return native(trained_by(optimizer)[int(place)])

    def _made_outer(self, optimizer: Any) -> Any:
        scope = contextlib.nullcontext() if on_a_replica() else self.strategy.scope()
        with tf.init_scope(), scope:
            self.makes_outer = True  # all replicas update its variables equally
            try:
                outer = self.rule.make_outer()
                self.strategy.optimizers.discard(outer)
                OPTIMIZER_BUILD.off(outer)
                outer.build(trained_by(optimizer))
            finally:
                self.makes_outer = False
        return outer

    def sent_by_rules(self) -> list[Row]:
        """Return rows of what rules send at the ends of rounds, besides the reducer's buckets."""
        return [row for course in self._courses.values() for row in course.outside.sent_by_rule()]

    @property
    def title(self) -> str:
        """Title of the explanation, for people."""
        if self.groups is None:
            return "What is sent at the end of a round, and before the first one"
        return (
            f"What is sent within groups of {self.groups.size} replicas in each step, and between "
            "them at the end of a round"
        )

    def words(self) -> str:
        """Return a text, for people, on the next agreements, their costs and the last drift."""
        found = [words for course in self._courses.values() if (words := course.outside.words())]
        return " ".join([f"Replicas agree by {self.rule!r}.", *found])

    def figures(self) -> dict[str, float]:
        """Return figures of all rounds, by name.

        ``rounds`` is the number of rounds that are over. ``drift`` is the largest distance of
        weights from their mean at the end of the last round. ``hidden`` is the share of the
        exchanges' time during which replicas did not wait, if exchanges run in the background.
        """
        begun = [c.outside for c in self._courses.values() if c.outside.has_begun]
        figures = {
            "rounds": sum(seen.ended()[1] for seen in begun),
            "drift": max((seen.drift() for seen in begun), default=0.0),
        }
        hidden = [share for seen in begun if (share := seen.hidden()) is not None]
        return figures | ({"hidden": min(hidden)} if hidden else {})

    def behind(self) -> tuple[float, float]:
        """Return how long all models waited for background exchanges, and how long these took.

        Both times are in seconds.
        """
        each = [c.outside.behind() for c in self._courses.values() if c.outside.has_begun]
        return sum(waited for waited, _ in each), sum(took for _, took in each)

    def before_evaluation(self, model: Any) -> None:
        """Load the weights to evaluate, on a replica.

        The model may be a part of another model that trains in rounds.
        """
        course = self._courses.get(model)
        if course is None or not course.outside.is_apart():
            course = self.of(model)
        course.before_evaluation()
        for other, course in list(self._courses.items()):
            if other is not model:
                course.before_evaluation()

    def as_seen(self, variable: LocalWeight) -> Any:
        """Return what a variable reads as outside of replicas; None if all have the same value."""
        values = (course.outside.value(variable) for course in self._of_variable(variable))
        return next((value for value in values if value is not None), None)

    def is_apart(self, variable: LocalWeight) -> bool:
        """Return whether replicas may have different values of a variable."""
        return any(course.outside.is_apart() for course in self._of_variable(variable))

    def assigned(self, variable: LocalWeight) -> None:
        """Update the rounds of a variable that has been assigned outside of replicas."""
        for course in self._of_variable(variable):
            course.outside.assigned(variable)

    def _of_variable(self, variable: LocalWeight) -> list[Course]:
        return [course for course in self._courses.values() if id(variable) in course.places]
