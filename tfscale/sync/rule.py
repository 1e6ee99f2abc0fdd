"""Base of all sync rules: how long replicas train alone, and how they agree then.

A *round* is a number of steps that each replica makes alone, on its own part of the data, and the
agreement of all replicas at their end. The strategy calls a rule on every replica while it traces a
step. The rule must do the same on all replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfscale.collectives import Schedule
from tfscale.collectives.wires import LOSSLESS
from tfscale.compression.policy import MethodPolicy
from tfscale.support import arguments
from tfscale.sync.period import Period, checked_count, checked_period


class Round(Protocol):
    """A round on one replica, with the operations that a rule may use at its beginning and end.

    Attributes:
        weights: weights of this replica, which rules assign.
        replicas: number of replicas.
    """

    weights: list[tf.Variable]
    replicas: int

    def kept(self, name: str) -> list[tf.Tensor]:
        """Return the values that are kept under a name: one for each weight, in the weight's type.

        If the name is ``in_shards``, replicas send each other their shards.

        Args:
            name: one of the rule's ``keeps``.
        """

    def keep(self, name: str, values: Sequence[tf.Tensor]) -> None:
        """Keep one value for each weight under a name; values must be the same on all replicas."""

    def add(self, name: str, values: Sequence[tf.Tensor]) -> None:
        """Add the sum of all replicas' values to the values that are kept under a name.

        Args:
            name: one of the rule's ``in_shards``.
            values: values of this replica, one for each weight.
        """

    def mean(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the means of values over all replicas, by the rule's ``policy``.

        Args:
            values: values of this replica, one for each weight.
        """

    def mix(
        self, values: Sequence[tf.Tensor], mixtures: Sequence[Schedule], wire: str = LOSSLESS
    ) -> list[tf.Tensor]:
        """Return values, mixed with the values of a few other replicas.

        Args:
            values: values of this replica, one for each weight.
            mixtures: mixtures of ``tfscale.collectives``, which take turns, round by round. They
                must be doubly stochastic, to preserve the mean over replicas.
            wire: format in which values are sent.
        """

    @property
    def number(self) -> tf.Tensor:
        """Number of rounds that are over, an int32."""

    @property
    def in_flight(self) -> tf.Tensor:
        """Number of the part whose values are being sent, an int32; -1 if there is none."""

    def part(self, number: int, places: Sequence[int]) -> Round:
        """Return this round with only a part of the weights.

        Args:
            number: number of the part.
            places: indices of the part's weights.
        """

    def send(self, values: Sequence[tf.Tensor]) -> None:
        """Start to send a part's values, one for each weight, while training continues.

        Only one part's values may be on their way at a time, except at the end of ``fit``.
        """

    def take(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the means over all replicas of a part's sent values, by the rule's ``policy``.

        Args:
            values: values that this replica would send now.
        """

    def average_optimizer(self) -> None:
        """Replace the optimizer's state by its mean over all replicas."""

    def outer_step(self, gradients: Sequence[tf.Tensor], counts: bool = True) -> None:
        """Update the weights, which must be equal on all replicas, by the rule's outer optimizer.

        Args:
            gradients: one gradient for each weight.
            counts: whether the optimizer counts this as a step; of several parts, one must count.
        """


class Rule:
    """Base class of sync rules, which say when replicas agree, and on what.

    Attributes:
        every: number of steps in a round, or a ``Period``. It has no default: each rule sets it, or
            defines ``table``.
        delay: number of steps of the next round after which the strategy calls ``land``; 0: never.
        start: number of synchronous steps before the first round.
        bound: number of steps by which all replicas apply the sums of gradients late, with the same
            weights on all replicas; 0 for rules whose replicas apply their own gradients.
        skips: whether a replica that others wait for leaves out batches, if there is a ``bound``.
        keeps: names of values that the rule keeps for each weight, the same on all replicas.
        kept_weights: names in ``keeps`` whose values are weights. If a program assigns a weight in
            the middle of a round, outside of replicas, tfscale assigns these values, too.
        in_shards: names in ``keeps`` of which each replica holds a part, its shard. All workers
            save the shards together. There is one exception, for the name in ``reads_as`` if
            ``agrees`` is False: while all replicas have the same weights, as after ``settle``, the
            weights stand for its values.
        reads_as: name in ``keeps`` whose values are read in place of the weights, outside of
            replicas and in evaluations, while replicas have different weights; None for the mean
            over replicas.
        agrees: whether all replicas have the same weights after a round. If False, ``settle`` must
            make them equal at the end of ``fit``. There, ``fit`` raises an error if replicas that
            train by a user's own rule have different weights.
        has_outer: whether ``make_outer`` makes an optimizer, for ``Round.outer_step``.
    """

    every: int | Period
    delay: int = 0
    start: int = 0
    bound: int = 0
    skips: bool = False
    keeps: tuple[str, ...] = ()
    kept_weights: tuple[str, ...] = ()
    in_shards: tuple[str, ...] = ()
    reads_as: str | None = None
    agrees: bool = True
    has_outer: bool = False

    @property
    def round_rule(self) -> Rule:
        """Rule that ends rounds: this rule, or the rule between the groups of ``Hierarchical``."""
        return self

    @property
    def simplest(self) -> Rule:
        """Simplest rule that trains in the same way: this rule, unless a setting does nothing."""
        return self

    @property
    def sums_gradients(self) -> bool:
        """Whether some steps sum gradients over several replicas."""
        return self.start > 0

    def team_size(self, devices: int, hosts: Sequence[str]) -> int:
        """Return how many consecutive replicas make each step together, as one larger replica.

        Args:
            devices: number of replicas of each worker.
            hosts: name of each worker's host.
        """
        return 1

    @property
    def policy(self) -> MethodPolicy:
        """Methods with which ``Round.mean`` computes means."""
        return MethodPolicy()

    def __repr__(self) -> str:
        """Return the class's name, ``every``, and the other settings.

        A dataclass leaves out the settings that have their defaults.
        """
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
        """Return all settings: workers whose descriptions differ do not train together."""
        return repr(self)

    def table(self) -> Sequence[int]:
        """Return the lengths of the first rounds, in steps; later rounds have the last length."""
        return self.every.table() if isinstance(self.every, Period) else [self.every]

    def make_outer(self) -> Any:
        """Return a new optimizer of Keras; the strategy calls this in its scope."""
        raise NotImplementedError

    def check(self, replicas: int) -> None:
        """Raise ``ValueError`` if the rule does not work with this number of replicas."""

    def begin(self, round: Round) -> None:
        """Begin a round, before its first step.

        The strategy calls this if the rule keeps values, and all replicas have the same weights
        then. If ``reads_as`` is a
        name, the strategy also calls this before the first step after it has read a file.
        """

    def end(self, round: Round) -> None:
        """End a round, after its last step."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define end(self, round). Define it: tfscale calls it "
            "after the last step of a round, to make replicas agree"
        )

    def land(self, round: Round) -> None:
        """Take the values that ``end`` has sent, ``delay`` steps after the end of a round."""

    def settle(self, round: Round) -> None:
        """Make weights equal on all replicas at the end of ``fit``, after the end of a round."""


def assign(round: Round, values: Sequence[Any]) -> None:
    """Assign values to the weights of a round."""
    for weight, value in zip(round.weights, values, strict=True):
        weight.assign(value)


def refuse_wrong_lengths(rule: Rule) -> None:
    """Raise ``ValueError`` if a user's rule does not say how many steps its rounds have."""
    kind = type(rule).__name__
    if type(rule).table is Rule.table:
        if not hasattr(rule, "every"):
            raise ValueError(_NO_LENGTH.format(kind=kind))
        what = "a number of steps, or a tfscale.sync.Period (for other lengths define table)"
        checked_period(rule.every, f"every of sync={kind}(...)", what)
    lengths = rule.table()
    if not isinstance(lengths, (list, tuple)) or not lengths:
        raise arguments.wrong(lengths, f"table() of sync={kind}(...)", _LENGTHS)
    for place, length in enumerate(lengths):
        checked_count(length, f"table()[{place}] of sync={kind}(...)")


_LENGTHS = "a list of numbers of steps, one for each of the first rounds"
_NO_LENGTH = (
    "sync={kind}(...) does not say how many steps a round has: the class needs an attribute every, "
    "a number of steps or a tfscale.sync.Period. Add a line such as every: int = 4 to the class; "
    "or define table(), which returns the lengths of the first rounds"
)
