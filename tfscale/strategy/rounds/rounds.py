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
from tfscale.exchange.slots import COMMON, Slots, creating
from tfscale.strategy.protocols import Strategy
from tfscale.strategy.rounds.late_rounds import LateRounds
from tfscale.strategy.rounds.late_sums import warn_of_rate
from tfscale.strategy.rounds.model_rounds import ModelRounds
from tfscale.strategy.rounds.round_report import RoundReport
from tfscale.strategy.rounds.round_state import RoundState, optimizer_of, slots_of
from tfscale.strategy.step import on_a_replica
from tfscale.strategy.teams import Teams
from tfscale.strategy.variables import Weight
from tfscale.sync.rule import Rule


class Rounds:
    """Rounds of all models of a strategy.

    Args:
        strategy: strategy whose replicas train in rounds.
        rule: rule that says when teams agree, and on what.
        reducer: reducer that computes means by the rule's policy.
        teams: teams of replicas, each of which makes its steps together.

    Attributes:
        outer: the rule's outer optimizer beside each optimizer of a model.
    """

    def __init__(self, strategy: Strategy, rule: Rule, reducer: Reducer, teams: Teams) -> None:
        self.strategy, self.rule, self.reducer, self.teams = strategy, rule, reducer, teams
        rule.check(teams.number)
        if unknown := [name for name in rule.in_shards if name not in rule.keeps]:
            raise ValueError(
                f"sync={rule!r} names {unknown[0]!r} in in_shards, but not in keeps, which is "
                f"{rule.keeps!r}. Add {unknown[0]!r} to keeps, too"
            )
        self._models: weakref.WeakKeyDictionary[Any, ModelRounds] = weakref.WeakKeyDictionary()
        self.outer: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def of(self, model: Any) -> ModelRounds:
        """Return the rounds of a model; the first call makes them."""
        found = self._models.get(model)
        if found is None or found.state.optimizer is not optimizer_of(model):
            if found is not None and found.is_apart():
                raise RuntimeError(
                    f"the model {model.name!r} has been compiled anew in the middle of a round, "
                    "while its replicas have different weights. Call fit, which ends that round "
                    "first; or compile the model after a fit, when its replicas agree"
                )
            state = RoundState(
                self.strategy, self.rule, self.reducer, self.teams, model, self.outer
            )
            found = LateRounds(state) if self.rule.bound else ModelRounds(state)
            self._models[model] = found
        return found

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
        found = self._models.get(model)
        if found is not None and found.state.optimizer is not optimizer:
            # A fit was interrupted, so its hook is still there; then the model was compiled anew.
            END_OF_FIT.off(found.state.optimizer)
            found.close()
            model.test_function = model.predict_function = None  # they use the old rounds
        if optimizer is not None:
            warn_of_rate(self.rule, optimizer)
            END_OF_FIT.off(optimizer)  # an interrupted fit may have left its hook
            END_OF_FIT.put(optimizer, functools.partial(self._end_of_fit, model))

    def _refuse(self, callback: Any) -> None:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            raise ValueError(
                f"the callback SwapEMAWeights does not work with sync={self.rule!r}: it changes "
                "weights while replicas have different ones, or sums of gradients are on their "
                "way. Leave out the callback, and give the optimizer ema_overwrite_frequency=None: "
                "the weights become the averages at the end of fit"
            )
        several = self.strategy.extended.number_of_workers > 1
        if several and isinstance(callback, keras.callbacks.TerminateOnNaN):
            raise ValueError(
                f"the callback TerminateOnNaN does not work with sync={self.rule!r} on several "
                "workers: each worker sees the loss of its own batches, so one worker would stop "
                "and the others would wait for it. Use a callback that stops at the end of an "
                "epoch, when all workers see the same loss"
            )

    def _refuse_length(self, length: Mapping[str, Any]) -> None:
        several = self.strategy.extended.number_of_workers > 1
        if not several or length["number of steps in an epoch"] is not None:
            return
        if self.teams.size > len(self.strategy.extended.worker_devices):
            raise ValueError(
                f"sync={self.rule!r} has groups of several workers, which need equal numbers of "
                "batches, but the number of batches of these data is unknown. Pass steps_per_epoch "
                "to fit"
            )
        if self.rule.start or self.rule.bound:
            what = "sums the gradients of all workers in each step"
            if self.rule.start:
                what = "begins with synchronous steps"
            raise ValueError(
                f"sync={self.rule!r} {what}, for which all workers need equal numbers of batches, "
                "but the number of batches of these data is unknown. Pass steps_per_epoch to fit"
            )
        table = self.rule.table()
        if table[-1] < table[0] and length["number of epochs"] > 1:
            raise ValueError(
                f"sync={self.rule!r} has rounds that get shorter, and the number of batches of "
                "these data is unknown. A worker without batches would need more steps in later "
                "epochs than Keras gives it. Pass steps_per_epoch to fit; or call fit once for "
                "each epoch"
            )

    def _end_of_fit(
        self, model: Any, finalize: Callable[..., None], optimizer: Any, variables: Any
    ) -> None:
        """End the model's round at the end of ``fit``, then finalize its variables.

        This replaces the method that Keras calls once at the end of ``fit``.
        """
        END_OF_FIT.off(optimizer)
        if model in self._models:
            self._models[model].close()
        finalize(optimizer, variables)

    def built(self, optimizer: Any, state: Slots) -> None:
        """Set up the state of an optimizer that has been built in the scope.

        The rule says which values are kept in shards, and whether there is an outer optimizer.
        """
        state.declare(slots_of(self.rule, optimizer))
        if self.rule.has_outer and optimizer not in self.outer:
            outer = self.outer[optimizer] = self._made_outer(optimizer)
            state.adopt("outer optimizer", [native(v) for v in outer.variables], begins=True)

    def _made_outer(self, optimizer: Any) -> Any:
        scope = contextlib.nullcontext() if on_a_replica() else self.strategy.scope()
        with tf.init_scope(), scope, creating(COMMON):  # all replicas update it equally
            outer = self.rule.make_outer()
            self.strategy.optimizers.discard(outer)
            OPTIMIZER_BUILD.off(outer)
            outer.build(trained_by(optimizer))
        return outer

    # -- for ``explain`` and telemetry

    def _reports(self) -> list[RoundReport]:
        return [RoundReport(one) for one in self._models.values() if one.state.has_counters()]

    def sent_by_rules(self) -> list[Row]:
        """Return rows of what rules send at the ends of rounds, besides the reducer's buckets."""
        return [row for report in self._reports() for row in report.sent_by_rule()]

    @property
    def title(self) -> str:
        """Title of the explanation, for people."""
        if self.rule.bound:
            return "What is sent behind steps"
        if self.teams.size == 1:
            return "What is sent at the end of a round, and before the first one"
        return (
            f"What is sent within groups of {self.teams.size} replicas in each step, and between "
            "them at the end of a round"
        )

    def words(self) -> str:
        """Return a text, for people, on the next agreements, their costs and the last drift."""
        every = [report.words() for report in self._reports()]
        return " ".join([f"Replicas agree by {self.rule!r}.", *every])

    def figures(self) -> dict[str, Any]:
        """Return figures of all rounds, by name.

        ``rounds`` is the number of rounds that are over. ``drift`` is the largest distance of
        weights from their mean at the end of the last round. ``hidden`` is the share of the
        exchanges' time during which replicas did not wait, if exchanges run in the background.

        With a rule that has a ``bound`` there are no rounds, and replicas do not drift apart.
        Instead ``staleness`` counts steps by the number of sums that their weights lacked, and
        ``waits`` are the seconds that each rank has waited for the others. If the rule ``skips``,
        ``skipped`` is the number of batches that this process's replicas have left out.
        """
        reports = self._reports()
        hidden = [1 - float(one.waited / one.took) for one in reports if one.took]
        figures: dict[str, Any]
        if self.rule.bound:
            figures = {
                "staleness": _sums([report.staleness for report in reports]),
                "waits": _sums([report.waits for report in reports]),
            }
            if self.rule.skips:
                figures["skipped"] = sum(report.skipped for report in reports)
        else:
            figures = {
                "rounds": sum(report.rounds for report in reports),
                "drift": max((report.drift for report in reports), default=0.0),
            }
        return figures | ({"hidden": min(hidden)} if hidden else {})

    def seconds_behind(self) -> float:
        """Return how long this process's slowest replica has waited for background exchanges."""
        every = [one.state.flags.values() for one in self._models.values()]
        return sum(max((float(f.waited.numpy()) for f in flags), default=0.0) for flags in every)

    def behind(self) -> tuple[float, float]:
        """Return how long all models waited for background exchanges, and how long these took.

        Both times are in seconds.
        """
        reports = self._reports()
        return sum(float(one.waited) for one in reports), sum(float(one.took) for one in reports)

    # -- weights and evaluations, between the steps of training

    def before_evaluation(self, model: Any) -> None:
        """Load the weights to evaluate, on a replica.

        The model may be a part of another model that trains in rounds.
        """
        found = self._models.get(model)
        if found is None or not found.is_apart():
            found = self.of(model)
        for one in [found, *(one for one in list(self._models.values()) if one is not found)]:
            one.before_evaluation()

    def as_seen(self, variable: Weight) -> Any:
        """Return what a variable reads as outside of replicas; None if all have the same value."""
        values = (one.value_of(variable) for one in self._with(variable))
        return next((value for value in values if value is not None), None)

    def is_apart(self, variable: Weight) -> bool:
        """Return whether replicas may have different values of a variable."""
        return any(one.is_apart() for one in self._with(variable))

    def assigned(self, variable: Weight) -> None:
        """Update the rounds of a variable that has been assigned outside of replicas."""
        for one in self._with(variable):
            one.assigned(variable)

    def _with(self, variable: Weight) -> list[ModelRounds]:
        return [one for one in self._models.values() if id(variable) in one.state.places]


def _sums(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the sums of equally long lists of numbers."""
    return [sum(column) for column in zip(*rows, strict=True)]
