"""Shares that follow what steps cost, so that all replicas finish their steps together.

Each replica measures how long it computes in a step, without its waits for others. The sum of the
numbers of rows, which each step begins with, carries these times to all replicas, and the weights
that the first replica wants to them: so all replicas change their shares after the same step.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.bridge.runtime import moment
from tfscale.exchange.slots import Slots
from tfscale.exchange.team import Team
from tfscale.native.cell import Cell, make_cell
from tfscale.native.group import host_of
from tfscale.strategy.shares import OWNER, Shares, weights_for

FIRST_WINDOW, LAST_WINDOW = 10, 160  # steps that are measured before a decision
WARM_UP = 3  # steps that no decision counts
WORTHWHILE = 0.05  # share of a step's time that a change must save, in two windows

_log = logging.getLogger("tfscale")


@dataclasses.dataclass(frozen=True)
class Window:
    """Sums over some steps, for each rank.

    Attributes:
        steps: number of steps.
        rows: rows that each rank has taken.
        busy: microseconds in which each rank has computed.
    """

    steps: int
    rows: np.ndarray
    busy: np.ndarray

    def __add__(self, other: Window) -> Window:
        return Window(self.steps + other.steps, self.rows + other.rows, self.busy + other.busy)

    @property
    def seconds(self) -> np.ndarray:
        """Seconds in which each rank has computed, on average in a step."""
        return self.busy / self.steps / 1e6


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of shares.

    Attributes:
        step: number of measured steps of the program before the change.
        shares: parts of the rows that the ranks take from here on.
        seconds: how long each rank has computed in a step before.
        saves: share of a step's time that the change saves.
    """

    step: int
    shares: list[float]
    seconds: list[float]
    saves: float

    def __str__(self) -> str:
        now = ", ".join(f"{share:.1%}" for share in self.shares)
        took = ", ".join(f"{1e3 * one:,.1f}" for one in self.seconds)
        return (
            f"after {self.step:,} steps, in which the replicas computed for {took} ms, they take "
            f"{now} of the rows: this saves {self.saves:.0%} of a step's time"
        )


def wanted(shares: Shares, weights: np.ndarray, window: Window) -> tuple[list[int], float]:
    """Return the weights with which all ranks finish together, and the share of time they save.

    A rank's speed is the number of rows that it has taken in a second. If a part of its time does
    not depend on rows, the next window shows what is left to change.
    """
    if not (window.rows.all() and window.busy.all()):
        return [int(weight) for weight in weights], 0.0
    speeds = window.rows / window.busy
    made = weights_for(speeds.tolist())
    rows = shares.rows_of_ranks(np.array(made), round(window.rows.sum() / window.steps))
    before = (window.busy / window.steps).max()
    return made, float(1 - (rows / speeds).max() / before)


class Balance:
    """Measures the steps of a strategy's replicas, and changes their shares.

    Args:
        shares: the shares to change.
        team: all replicas.
        devices: devices of this process's replicas.

    Attributes:
        changes: changes that this process knows of, the last one last.
    """

    def __init__(self, shares: Shares, team: Team, devices: list[str]) -> None:
        self.shares, self._team = shares, team
        self._hosts = [host_of(device) for device in devices]
        self.changes: list[Change] = []
        self._last: Window | None = None
        self._length, self._steps = FIRST_WINDOW, 0
        ranks = [0] * team.size
        # Rows of each replica's last step, and microseconds in which the replica computed.
        self._measured = [make_cell(host, tf.int64, [0, 0]) for host in self._hosts]
        # The first replica keeps the window's steps, rows and microseconds, and the new weights.
        begin = [[-WARM_UP] * team.size, ranks, ranks]
        self._window = make_cell(self._hosts[0], tf.int64, begin)
        self._pending = make_cell(self._hosts[0], tf.int64, ranks)
        self._wanted_length = make_cell(self._hosts[0], tf.int64, FIRST_WINDOW)

    def keep_in(self, slots: Slots) -> None:
        """Save the shares with an optimizer."""
        slots.adopt(OWNER, [self.shares.weights], begins=False)

    def clock(self, replica: int) -> Clock:
        """Return a clock of the step that a replica makes."""
        return Clock(self._hosts[replica], self._measured[replica])

    def news(self, replica: int) -> News:
        """Return what a replica tells all others at the beginning of a step."""
        return News(self, replica)

    def told(self, total: tf.Tensor) -> None:
        """Follow what all replicas have told, on each worker's first replica.

        Args:
            total: rows, microseconds and weights of all ranks.
        """
        rows, busy, weights = tf.unstack(tf.reshape(total, [3, self._team.size]))
        self.shares.weights.assign(weights)
        if self._team.rank(0) > 0:
            return
        counts = tf.reduce_all(rows > 0)
        steps, *sums = tf.unstack(self._window.read(), 3)
        is_warm = tf.logical_and(counts, steps >= 0)
        sums = [x + tf.where(is_warm, y, 0) for x, y in zip(sums, (rows, busy), strict=True)]
        steps += tf.cast(counts, tf.int64)
        is_full = steps[0] >= self._wanted_length.read()

        def decided() -> list[tf.Tensor]:
            found = tf.numpy_function(
                self._decide, [steps[0], *sums, weights], [tf.int64, tf.int64]
            )
            return [tf.ensure_shape(found[0], weights.shape), tf.ensure_shape(found[1], [])]

        def kept() -> list[tf.Tensor]:
            return [tf.zeros_like(weights), self._wanted_length.read()]

        pending, length = tf.cond(is_full, decided, kept)
        begins = tf.where(tf.reduce_any(pending > 0), tf.constant(-WARM_UP, tf.int64), 0)
        fresh = tf.stack(
            [begins + tf.zeros_like(weights), tf.zeros_like(rows), tf.zeros_like(busy)]
        )
        self._window.assign(tf.where(is_full, fresh, tf.stack([steps, *sums])))
        self._wanted_length.assign(length)
        self._pending.assign(pending)

    def told_by(self, replica: int) -> tf.Tensor:
        """Return a replica's last rows and microseconds, and on rank 0 the weights for all."""
        rank, size = self._team.rank(replica), self._team.size
        rows, busy = tf.unstack(self._measured[replica].read(), 2)
        own = [
            tf.one_hot(rank, size, x, tf.zeros([], tf.int64), dtype=tf.int64) for x in (rows, busy)
        ]
        weights = tf.zeros([size], tf.int64)
        if rank == 0:
            pending = tf.ensure_shape(self._pending.read(), [size])
            now = self.shares.weights.read_value()
            weights = tf.where(tf.reduce_any(pending > 0), pending, now)
        return tf.concat([*own, weights], 0)

    def _decide(
        self, steps: np.ndarray, rows: np.ndarray, busy: np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return new weights, or zeros for no change; and the length of the next window."""
        window = Window(int(steps), rows, busy)
        self._steps += window.steps + WARM_UP * (self._last is None)
        both = window if self._last is None else window + self._last
        made, saves = wanted(self.shares, weights, both)
        saved = [wanted(self.shares, weights, one)[1] for one in (window, self._last) if one]
        if len(saved) == 2 and min(*saved, saves) > WORTHWHILE:
            self._last, self._length = None, FIRST_WINDOW
            shares = [weight / sum(made) for weight in made]
            self.changes.append(Change(self._steps, shares, both.seconds.tolist(), saves))
            _log.info("shares: %s", self.changes[-1])
            return np.array(made, np.int64), np.int64(self._length)
        if min(saves, saved[0]) <= WORTHWHILE:
            self._length = min(2 * self._length, LAST_WINDOW)
        self._last = window
        return np.zeros_like(weights), np.int64(self._length)


class News:
    """Message of a replica to all others, which travels with its numbers of rows."""

    def __init__(self, balance: Balance, replica: int) -> None:
        self._balance, self._replica = balance, replica
        self.own = balance.told_by(replica)

    def told(self, total: tf.Tensor) -> None:
        """Follow the sum of what all replicas have told."""
        if self._replica == 0:
            self._balance.told(total)


class Clock:
    """Time that a replica computes in one step, without its waits for others.

    The clock stops while gradients are summed, and during the sums within the computation, such as
    those of batch normalization.

    Args:
        host: device of the processor.
        measured: cell that gets the rows and microseconds of the step.
    """

    def __init__(self, host: str, measured: Cell) -> None:
        self._host, self._measured = host, measured
        self._rows = tf.zeros([], tf.int64)
        self._busy = tf.zeros([], tf.float64)
        self._begin = tf.zeros([], tf.float64)
        self._graph: Any = None

    def start(self, rows: tf.Tensor, total: tf.Tensor, data: Any) -> Any:
        """Begin to measure a step, once replicas have told each other their rows; return the data.

        Args:
            rows: number of rows that this replica takes.
            total: number of rows that all replicas take.
            data: structure of the tensors that the step computes with.
        """
        self._rows, self._graph = rows, _graph()
        self._begin = self._now([total])
        return _after(self._begin, data)

    def leave_out(self, combine: Callable[[list[Any]], list[Any]], own: list[Any]) -> list[Any]:
        """Return what other replicas and this one make of some tensors, and leave out its time."""
        if _graph() is not self._graph:  # no tensor may leave a branch
            return combine(own)
        begin = self._now(own)
        found = combine(_after(begin, own))
        end = self._now(found)
        self._busy -= end - begin
        return _after(end, found)  # type: ignore[no-any-return]

    def stop(self, gradients: list[Any]) -> None:
        """Note that the replica has computed its gradients."""
        now = self._now([x for x in gradients if x is not None])
        busy = self._busy + now - self._begin
        micros = tf.cast(tf.maximum(1e6 * busy, 1), tf.int64)
        self._measured.assign(tf.stack([self._rows, micros]))
        if _graph() is self._graph:
            self._busy, self._begin = busy, now

    def go_on(self, sums: list[Any]) -> None:
        """Note that the replica has the sums of all gradients."""
        if _graph() is self._graph:
            self._begin = self._now([x for x in sums if x is not None])

    def _now(self, after: list[Any]) -> tf.Tensor:
        """Return the moment at which tensors are there."""
        flat = tf.nest.flatten(after, expand_composites=True)
        with tf.control_dependencies(flat), tf.device(self._host):
            return moment()


def _after(moment: tf.Tensor, tensors: Any) -> Any:
    """Return tensors that nobody gets before a moment: operations have no other order."""

    def later(x: Any) -> Any:
        return tf.identity(x) if tf.is_tensor(x) else x

    with tf.control_dependencies([moment]):
        return tf.nest.map_structure(later, tensors, expand_composites=True)


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
