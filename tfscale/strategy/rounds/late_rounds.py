"""Rounds of one model under a rule with a ``bound``, whose replicas keep the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.tensorflow import replica_id
from tfscale.strategy.rounds.late_sums import LateSums
from tfscale.strategy.rounds.model_rounds import ModelRounds, when
from tfscale.strategy.rounds.round import ReplicaRound
from tfscale.strategy.rounds.round_state import RoundState
from tfscale.strategy.step import Step, during
from tfscale.strategy.variables import LocalWeight


class LateRounds(ModelRounds):
    """One round, which ends whenever somebody looks at the weights.

    This is at the end of ``fit``, before an evaluation, and before a variable is read. The end
    applies all sums that are on their way, and takes the means of statistics.

    Args:
        state: state of the model's rounds, whose rule has a ``bound``.
    """

    def __init__(self, state: RoundState) -> None:
        super().__init__(state)
        self._late = LateSums(state)

    def sum_late(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Begin to sum a step's gradients behind steps, and apply the sum that is due."""
        self._late.step(replica_id(), grads, variables)

    def thinned(self, data: Any) -> Any:
        """See ``ModelRounds``."""
        return self._late.thinned(replica_id(), data)

    @property
    def skipped(self) -> int:
        """Number of batches that this process's replicas have left out."""
        return self._late.skipped

    def value_of(self, variable: LocalWeight) -> Any:
        """End the round, so that all replicas have the same value; return None."""
        if self.state.flags:
            self.close()

    def _mixed_by_rule(self) -> Sequence[Any]:
        """Return nothing: replicas have the same weights, unless a step moves them."""
        return []

    def _after_local_step(self, round: ReplicaRound, position: tf.Tensor) -> None:
        """Do nothing: no step ends the round."""

    def _before_evaluation(self, round: ReplicaRound) -> None:
        when(round.flags.optimizers_differ.read(), lambda: self._catch_up(round))

    def _settle(self) -> None:
        self._catch_up(self._round())

    def _catch_up(self, round: ReplicaRound) -> None:
        """Apply all late sums, and take the means of statistics."""
        with during(Step(is_reduced=True)):
            self._late.catch_up(round.replica)
            round.average(self._statistics, "statistics")
        round.steps.assign(round.optimizer_steps())
        round.flags.agree()
