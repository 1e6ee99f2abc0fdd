"""One step on one replica: the class ``Step``, of which each thread holds one object."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfscale.exchange import dataflow
from tfscale.exchange.rows import numbers_of
from tfscale.exchange.team import Team
from tfscale.strategy.batch.balance import Clock
from tfscale.strategy.batch.rows import Rows
from tfscale.strategy.changed import Gradients
from tfscale.strategy.grid.whole import WholeWeights
from tfscale.strategy.share import Share
from tfscale.strategy.step_graph import RESIZES, StepGraph

_DIVISOR_OF_A_MICROBATCH = (
    "a loss divides by a number that differs between microbatches, such as a sum of weights, a "
    "number of unmasked steps or of elements of unknown shape. A pipeline computes gradients of "
    "the first microbatch before it knows this number of the last one. Give the loss "
    'reduction="sum" and divide by a constant yourself, give each row the same number of steps, or '
    "take microbatches=1"
)

# Sums, or joins, the tensors of a team's replicas.
Combine = Callable[[Team, list[Any]], list[Any]]


@dataclasses.dataclass
class Losses:
    """Facts that a step has found out about its losses so far.

    Attributes:
        are_read: whether the terms of a loss have been read whose gradients a tape computes.
        reads_before: in an eager step, how often the step had read its share when a layer last
            added a loss.
        scaled: in an eager step, the ids of added losses that have been scaled.
        in_variables: ids of handles of variables that have got scaled gradients in a loop.
        results: results of metrics, by their ids, until the logs of the step are made; None
            afterwards, and outside of the steps of ``fit``.
    """

    are_read: bool = False
    reads_before: int = 0
    scaled: set[int] = dataclasses.field(default_factory=set)
    in_variables: set[int] = dataclasses.field(default_factory=set)
    results: dict[int, Any] | None = None


@dataclasses.dataclass
class Assigned:
    """Variables that a replica has assigned in a step, and in which replicas may differ now.

    Attributes:
        differ_by_replica: variables that may have another value on each replica.
        differ_by_team: variables that have the same value on all replicas of a team.
    """

    differ_by_replica: list[Any] = dataclasses.field(default_factory=list)
    differ_by_team: list[Any] = dataclasses.field(default_factory=list)

    @property
    def every(self) -> list[Any]:
        """All these variables."""
        return [*self.differ_by_replica, *self.differ_by_team]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step on one replica.

    The replicas that make the step together are its *team*. The team is one of four: all replicas;
    a group; this replica alone; or all replicas, unless a tensor says that the replica is alone.

    A step without arguments is what a thread has outside of the steps of ``fit``: all replicas make
    it together, no rows are known, and assignments are not noted.

    Attributes:
        model: the model whose step runs; None in a custom training loop.
        is_own: whether the model's class has a step or a loss of its own, so that losses may be of
            any kind.
        sees_gradients: whether the step is the user's, in ``fit`` or in a custom loop: it gets
            gradients from its tapes and may change them.
        rows: numbers of rows that this replica and the others hold of the global batch.
        share: this replica's share of the rows, which ``num_replicas_in_sync`` returns.
        graph: what the tensors of the step depend on.
        losses: what is known of the losses so far.
        alone: whether the replica, or its group, makes this step without the other replicas: True,
            False or a boolean tensor.
        group: collectives of the group whose replicas make the step together; None if there are no
            groups.
        stage: collectives of the replicas that hold the same stage of a pipeline, whose layers and
            losses are summed over these only; None if replicas hold whole models.
        is_microbatch: whether the rows are a microbatch: a part of those that this replica reads.
        is_reduced: whether gradients have been summed. All later values are the same on all
            replicas: nothing is summed again, and each replica assigns its own copy of a variable.
        counts: whether this replica's samples count in metrics: of the replicas of a grid that read
            the same rows, one counts.
        read_before: whole weights that have been read before a loop, by the ids of their variables.
        whole_weights: whole weights of the step, if layers gather each weight when they read it.
        sees_parts: whether the replica reads its parts of weights, and not whole weights.
        updates_alone: whether an optimizer updates a weight that this replica alone holds: it may
            assign that weight and its slots only, for other replicas do not follow.
        window: a function that sums the gradients of a window, if gradients are accumulated.
        assigned: variables that this replica has assigned; None if assignments are not noted.
        clock: measures how long the replica computes in this step; None if nobody asks.
        gradients: gradients that tapes have given to a step of the user's own.
        agreed: references to tensors that are the same on all replicas: a statistic that is
            computed from these only need not be averaged.
    """

    model: Any = None
    is_own: bool = False
    sees_gradients: bool = False

    rows: Rows | None = None
    share: Share | None = None
    graph: StepGraph = dataclasses.field(default_factory=StepGraph)
    losses: Losses = dataclasses.field(default_factory=Losses)

    alone: Any = False
    group: Team | None = None
    stage: Team | None = None
    is_microbatch: bool = False

    counts: bool = True
    read_before: Mapping[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    whole_weights: WholeWeights | None = None
    sees_parts: bool = False
    is_reduced: bool = False
    updates_alone: bool = False
    window: Callable[[list[Any]], list[Any]] | None = None
    assigned: Assigned | None = None
    clock: Clock | None = None
    gradients: Gradients = dataclasses.field(default_factory=Gradients)
    agreed: set[Any] = dataclasses.field(default_factory=set)

    def as_reduced(self, window: Callable[[list[Any]], list[Any]] | None = None) -> Step:
        """Return the rest of this step, in which nothing is summed over replicas any more.

        Args:
            window: function that sums accumulated gradients at the end of their window.
        """
        return dataclasses.replace(self, is_reduced=True, window=window, gradients=Gradients())

    @property
    def sums_in_backward_pass(self) -> bool:
        """Whether the backward pass sums gradients of replicas that read different rows."""
        return self.whole_weights is not None

    # -- the team

    @property
    def is_of_all(self) -> bool:
        """Whether all replicas make this step together, so that they stay identical."""
        return self.alone is False

    @property
    def is_single(self) -> bool:
        """Whether this replica certainly makes the step by itself."""
        return self.alone is True and self.group is None

    def together(self, everybody: Team, combine: Combine, own: list[Any]) -> list[Any]:
        """Return what ``combine`` makes of the team's tensors; ``own`` where there is no team.

        Args:
            everybody: collectives of all replicas.
            combine: function of the team's collectives and of this replica's tensors.
            own: this replica's tensors.
        """
        if self.is_reduced or self.is_single:
            return own
        if self.alone is False:
            return combine(everybody if self.stage is None else self.stage, own)
        if self.alone is True:
            assert self.group is not None
            return combine(self.group, own)
        found: list[Any] = tf.cond(self.alone, lambda: own, lambda: combine(everybody, own))
        return found

    def rank_in_team(self, everybody: Team, replica: int) -> Any:
        """Return this replica's rank in its team; 0 where the replica is alone."""
        if self.stage is not None:
            return self.stage.rank(replica) if self.stage.size > 1 else 0
        if self.alone is True:
            return 0 if self.group is None else self.group.communicators[replica].rank
        return tf.where(self.alone, 0, everybody.communicators[replica].rank)

    @property
    def sums_nothing(self) -> tf.Tensor | None:
        """Whether the team sends no gradients in this step; None if it always sends some.

        All replicas that would exchange with each other get the same answer.
        """
        if self.group is not None:
            return self.nobody_has_rows
        return None if self.alone is False else self.alone

    def or_own(self, of_team: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
        """Return the team's value, or the replica's own value if the team sends nothing."""
        nothing = self.sums_nothing
        return of_team if nothing is None else tf.where(nothing, own, of_team)

    # -- its rows

    @property
    def nobody_has_rows(self) -> tf.Tensor:
        """Whether no replica of the team holds rows."""
        assert self.rows is not None
        return tf.equal(self.rows.total, 0)

    def counted(self, value: Any) -> Any:
        """Return a value, or zeros on a replica that holds no rows: it adds nothing to sums.

        Placeholder rows can produce NaN, and NaN * 0 is NaN: such values are replaced.
        """
        return value if self.rows is None else self.rows.counted(value)

    def counted_once(self, value: Any) -> Any:
        """Return a value that a metric adds up: zeros if another replica counts these rows."""
        return self.counted(value) if self.counts else tf.zeros_like(value)

    def sum_over_rows(self, x: Any) -> Any:
        """Return the sum over all replicas of the team that hold rows."""
        x = tf.nest.map_structure(self.counted, x)
        return tf.distribute.get_replica_context().all_reduce("SUM", x)

    def sum_of_batch(self, x: tf.Tensor) -> tf.Tensor:
        """Return the sum over the rows of the batch, each of them counted once."""
        total, copies = self.sum_over_rows(x), self.of_rows.copies
        if copies == 1:
            return total
        return total // copies if x.dtype.is_integer else total / copies

    def size_in_batch(self, size: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        """Return the size that a tensor of a microbatch would have for the whole batch.

        Args:
            size: number of the rows or of the elements of the tensor.
            x: the tensor.

        Raises:
            ValueError: rows have different numbers of elements.
        """
        if not self.has_equal_rows(x):
            raise ValueError(_DIVISOR_OF_A_MICROBATCH)
        share = self.of_rows
        of_row = size // tf.cast(tf.maximum(share.local, 1), size.dtype)  # a placeholder is a row
        return of_row * tf.cast(share.total // share.copies, size.dtype)

    def refuse_microbatches(self) -> None:
        """Raise if a loss would divide by a number that later microbatches change."""
        if self.is_microbatch:
            raise ValueError(_DIVISOR_OF_A_MICROBATCH)

    # -- its shares

    @property
    def of_rows(self) -> Share:
        """Share of the rows that this replica holds."""
        assert self.share is not None
        return self.share

    def share_of_elements(self, x: tf.Tensor) -> Share:
        """Return this replica's share of the elements of all replicas' ``x``.

        Most often it is equal to the share of the rows, which is known. Otherwise replicas add up
        how many elements they hold.
        """
        of_rows, rows = self.of_rows, self.rows
        assert rows is not None
        if tf.executing_eagerly() or (self.is_microbatch and self.has_equal_rows(x)):
            return of_rows
        several_unknown = x.shape.rank is None or [*x.shape].count(None) > 1
        if several_unknown or self.graph.depends_on(RESIZES, x):
            return self.share_of_divisor(tf.size(x, tf.int64))
        place = self.graph.source_of(x)
        if rows.uniform is None or place == 0:
            return of_rows
        if place is not None:
            return of_rows.of(*rows.of_others[place - 1])

        def counted() -> tuple[tf.Tensor, tf.Tensor]:
            share = self.share_of_divisor(tf.size(x, tf.int64))
            return share.local, share.total

        return of_rows.of(*tf.cond(rows.uniform, lambda: (of_rows.local, of_rows.total), counted))

    def has_equal_rows(self, x: tf.Tensor) -> bool:
        """Return whether all rows of a tensor, on all replicas, have equally many elements."""
        return None not in x.shape[1:] and not self.graph.depends_on(RESIZES, x)

    def share_of_divisor(self, divisor: tf.Tensor) -> Share:
        """Return this replica's share of the divisor of a loss, which replicas add up."""
        self.refuse_microbatches()
        return self.of_rows.of(self.counted(divisor), self.sum_over_rows(divisor))

    def are_scaled(self, values: Sequence[Any], since: int = 0) -> list[bool]:
        """Return which of these losses, or gradients of losses, have a share as a factor.

        The graph shows the factor. In an eager step, losses count as scaled once the step has read
        its share more often than ``since``.
        """
        if tf.executing_eagerly():
            return [self.of_rows.reads > since] * len(values)
        numbers, kept = [numbers_of(v) for v in values], self.losses.in_variables
        found = self.graph.are_scaled(numbers)
        if not kept:
            return found
        reads = dataflow.reading(numbers, kept)
        return [one or other for one, other in zip(found, reads, strict=True)]

    def note_scaled(self, variable: tf.Variable, gradient: Any) -> None:
        """Note that a variable gets a gradient, if that has a share as a factor."""
        if self.share is not None and self.is_scaled(gradient):
            self.losses.in_variables.add(id(variable.handle))

    def is_scaled(self, value: Any, since: int = 0) -> bool:
        """Return whether one loss, or gradient of a loss, has a share as a factor."""
        return self.are_scaled([value], since)[0]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.step = Step()


_thread = _Thread()


def this_step() -> Step:
    """Return the step that this thread makes; outside of steps, a step without a model."""
    return _thread.step


@contextlib.contextmanager
def during(step: Step) -> Iterator[Step]:
    """Make ``step`` the step of this thread, within this context."""
    before, _thread.step = _thread.step, step
    try:
        yield step
    finally:
        _thread.step = before


def begin_in_this_thread(step: Step) -> None:
    """Make ``step`` the step of this thread until the thread ends."""
    _thread.step = step


def on_a_replica() -> bool:
    """Return whether a replica calls this, in a step of a strategy."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
