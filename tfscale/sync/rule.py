"""What a rule is: how long replicas train alone, and what they make of it.

A *round* is so many steps in which each replica trains on its own part of the data as if it were
alone, and the agreement at their end. A rule is called on every replica, while a step is traced,
and must do the same on all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfscale.collectives import Schedule
from tfscale.compression.policy import MethodPolicy, WirePolicy
from tfscale.sync.period import Period, table_of
from tfscale.wires import LOSSLESS


class Round(Protocol):
    """One round on one replica, and what a rule may do at its beginning and its end.

    Attributes:
        weights: this replica's, which rules assign.
        replicas: how many there are.
    """

    weights: list[tf.Variable]
    replicas: int

    def kept(self, name: str) -> list[tf.Tensor]:
        """What was kept by that name for each weight, in its type: one of the rule's ``keeps``.

        Of what is ``in_shards`` replicas send each other theirs.
        """

    def keep(self, name: str, values: Sequence[tf.Tensor]) -> None:
        """Keep these. They must be the same on all replicas."""

    def add(self, name: str, values: Sequence[tf.Tensor]) -> None:
        """To what is kept by a name that is ``in_shards``, add the sum of all replicas' values."""

    def mean(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Means over all replicas of one value for each weight, by the rule's ``policy``."""

    def mix(
        self, values: Sequence[tf.Tensor], mixtures: Sequence[Schedule], wire: str = LOSSLESS
    ) -> list[tf.Tensor]:
        """The weights, mixed with those of a few other replicas.

        Args:
            values: this replica's.
            mixtures: of ``tfscale.collectives``, doubly stochastic, so that the mean over replicas
                stays what it is. They take turns, round by round.
            wire: the format in which they are sent.
        """

    @property
    def number(self) -> tf.Tensor:
        """How many rounds are over, an int32."""

    @property
    def in_flight(self) -> tf.Tensor:
        """The number of the part whose values travel, an int32; -1 if none do."""

    def part(self, number: int, places: Sequence[int]) -> Round:
        """The same with some of the weights alone, those at these places."""

    def send(self, values: Sequence[tf.Tensor]) -> None:
        """Of a part: let values, one for each weight, begin to travel while steps are made.

        At most one part's may travel at a time, but at the end of ``fit``.
        """

    def take(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Of a part: the means over all replicas of what was sent, by the rule's ``policy``.

        Args:
            values: what this replica would send now.
        """

    def average_optimizer(self) -> None:
        """Make what the optimizer keeps the mean over all replicas."""

    def outer_step(self, gradients: Sequence[tf.Tensor], counts: bool = True) -> None:
        """Let the rule's ``outer`` optimizer change the weights, which agree.

        Args:
            gradients: one for each weight.
            counts: whether that is one of the optimizer's steps; of several parts one counts.
        """


class Rule:
    """When replicas agree, and on what.

    Attributes:
        every: how many steps a round has.
        delay: after how many steps of the next round ``land`` is called; 0: never.
        start: after how many steps, which are synchronous, the first round begins.
        keeps: names of what is kept for each weight, the same on all replicas.
        kept_weights: which of these are weights: one that is assigned in the middle of a round
            outside of replicas is assigned there, too.
        in_shards: which of these each replica holds a part of, its shard. All workers save them
            together; but what weights read as, if replicas do not agree after a round, is taken for
            the weights once they have the same, as after ``settle``.
        reads_as: which of these a weight reads as while replicas have different ones, outside of
            replicas and in evaluations; None for the mean over replicas.
        agrees: whether all replicas have the same weights after a round.
        has_outer: whether ``make_outer`` makes an optimizer, for ``Round.outer_step``.
    """

    every: int | Period = 1
    delay: int = 0
    start: int = 0
    keeps: tuple[str, ...] = ()
    kept_weights: tuple[str, ...] = ()
    in_shards: tuple[str, ...] = ()
    reads_as: str | None = None
    agrees: bool = True
    has_outer: bool = False

    @property
    def policy(self) -> MethodPolicy:
        """By which methods ``Round.mean`` computes."""
        return WirePolicy(LOSSLESS).methods()

    def __repr__(self) -> str:
        """How many steps its rounds have, and those of its settings that have to be said."""
        if dataclasses.is_dataclass(self):
            fields = dataclasses.fields(self)
            names = [
                f.name for f in fields if f.name == "every" or getattr(self, f.name) != f.default
            ]
        else:
            names = ["every", *(name for name in vars(self) if name[0] != "_" and name != "every")]
        values = {name: getattr(self, name) for name in names}
        said = (f"{name}={value!r}" for name, value in values.items() if value is not None)
        return f"{type(self).__name__}({', '.join(said)})"

    def describe(self) -> str:
        """All settings: workers whose descriptions differ do not train together."""
        return repr(self)

    def table(self) -> list[int]:
        """How many steps the first rounds have; those after them are as long as the last."""
        return table_of(self.every)

    def make_outer(self) -> Any:
        """A new optimizer of Keras; called in the strategy's scope."""
        raise NotImplementedError

    def check(self, replicas: int) -> None:
        """Refuse a number of replicas that the rule is not for."""

    def begin(self, round: Round) -> None:
        """Called before a round's first step, if all replicas have the same weights then.

        If weights read as something that is kept, also before the first step after a file is read.
        """

    def end(self, round: Round) -> None:
        """Called after a round's last step."""
        raise NotImplementedError

    def land(self, round: Round) -> None:
        """Called ``delay`` steps after the end of a round: what was sent there is taken."""

    def settle(self, round: Round) -> None:
        """Called at the end of ``fit``, after the end of a round: all are to agree."""
