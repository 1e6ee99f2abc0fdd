"""Report on the rounds of one model, for ``strategy.explain`` and for telemetry."""

from __future__ import annotations

import tensorflow as tf

from tfscale.exchange.explain import Row, row_of_mixtures, row_of_shards, rows
from tfscale.exchange.packing import describe
from tfscale.native.bucket import BucketId
from tfscale.strategy.rounds.model_rounds import ModelRounds
from tfscale.strategy.rounds.round import MIXED, SHARDS, SUM_INTO
from tfscale.strategy.rounds.round_state import POSITION, ROUNDS


class RoundReport:
    """Report on the rounds of one model, of which a step has been traced.

    Attributes:
        rounds: number of rounds that are over, without the synchronous start.
        drift: largest distance of weights from their mean, of this process's replicas.
        waited: seconds that this process's slowest replica waited for background exchanges.
        took: seconds that these exchanges took.
        staleness: how many steps had weights that lacked 0, 1, ... sums.
        waits: seconds that each rank has waited for the others.
        skipped: number of batches that this process's replicas have left out.
    """

    def __init__(self, model_rounds: ModelRounds) -> None:
        self._rounds, self._state = model_rounds, model_rounds.state
        flags = self._state.flags.values()
        counted = int(self._state.saved.whole(*ROUNDS).numpy())
        self.rounds = max(0, counted - bool(self._state.rule.start))
        self.drift = max(float(one.drift.numpy()) for one in flags)
        self.staleness = next(iter(flags)).staleness.numpy().tolist()
        self.waits = next(iter(flags)).waits.numpy().tolist()
        self.skipped = model_rounds.skipped
        self.waited, self.took = max((one.waited.numpy(), one.took.numpy()) for one in flags)

    def sent_by_rule(self) -> list[Row]:
        """Return rows of what a rule sends at the end of a round, besides the reducer's buckets."""
        state, everybody = self._state, self._state.reducer.team
        weights = [describe(v) for v in state.trained]
        if state.mixtures:
            bucket = BucketId(MIXED, state.label)
            return [row_of_mixtures(everybody, bucket, weights, state.mixtures, state.mixed_on)]
        return [
            row_of_shards(everybody, BucketId(name.format(kept), state.label), weights)
            for kept in state.rule.in_shards
            for name in (SHARDS, SUM_INTO)
        ]

    def words(self) -> str:
        """Return a text on the model's rounds and the next synchronization, for people."""
        state, whole = self._state, self._state.saved.whole
        if state.rule.bound:
            words = f"{state.name!r} applies the sums of gradients {state.rule.bound} steps late"
            return f"{words}{self._words_of_hidden()}."
        length = self._rounds.length_of(tf.constant(whole(*ROUNDS).numpy()))
        left = int(length) - int(whole(*POSITION).numpy())
        own = self.sent_by_rule() or [
            row for row in rows(state.reducer) if row.bucket.owner == state.label
        ]
        words = f"{state.name!r} has ended {self.rounds} rounds, and ends the next in {left} steps"
        if own:
            size, seconds = sum(row.bytes for row in own), sum(row.predicted for row in own)
            parts = state.background.parts
            what = "that mixes" if state.mixtures else "that sums"
            words += f"; {what if parts < 2 else f'{parts} in turn sum'} {size:,} bytes"
            words += f", in {1000 * seconds:.2f} ms by the model" if seconds else ""
        words += self._words_of_hidden()
        if self.drift:
            centre = state.rule.reads_as
            whose = centre if centre in state.rule.in_shards else "mean"
            words += f". At the last end weights were up to {self.drift:.3g} from their {whose}"
        return f"{words}."

    def _words_of_hidden(self) -> str:
        if not self.took:
            return ""
        hidden = 100 * (1 - self.waited / self.took)
        return f", of whose time {hidden:.0f} % went by behind steps"
