"""Shares that follow what steps cost, so that all replicas finish their steps together.

Each replica measures how long it computes in a step, without its waits for others. A sum over all
replicas carries these times, and the weights that the first replica wants: so all replicas change
their shares after the same step. In ``fit`` this is the sum of the numbers of rows with which each
step begins; under a rule with a ``bound``, the sum that travels with the gradients; in a custom
training loop, a sum of its own at the end of each call of ``optimizer.apply``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.bridge.runtime import moment
from tfscale.bridge.tensorflow import DistributedValues, sum_without_gradient
from tfscale.exchange.slots import Slots
from tfscale.exchange.team import Team
from tfscale.native.cell import Cell, make_cell
from tfscale.native.group import host_of
from tfscale.strategy.batch.rows import News, number_of_rows
from tfscale.strategy.batch.share_search import ShareSearch, Window
from tfscale.strategy.batch.shares import OWNER, Shares

WARM_UP = 3  # steps that no decision counts

_log = logging.getLogger("tfscale")


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


class Balance:
    """Measures the steps of a strategy's replicas, and changes their shares.

    Args:
        shares: the shares to change.
        team: all replicas.
        devices: devices of this process's replicas.
        bound: how many steps later replicas are told what others have measured.

    Attributes:
        changes: changes that this process knows of, the last one last.
    """

    def __init__(self, shares: Shares, team: Team, devices: list[str], bound: int = 0) -> None:
        self.shares, self._team, self._bound = shares, team, bound
        self._hosts = [host_of(device) for device in devices]
        self.changes: list[Change] = []
        self._search, self._steps = ShareSearch(shares.rows_of_ranks), 0
        ranks = [0] * team.size
        # Rows of each replica's last step, and microseconds in which the replica computed.
        self._measured = [make_cell(host, tf.int64, [0, 0]) for host in self._hosts]
        self._clocks = [make_cell(host, tf.float64, [0, 0, 0]) for host in self._hosts]
        # The first replica keeps the window's steps, rows and microseconds, and the new weights.
        begin = [[-WARM_UP] * team.size, ranks, ranks]
        self._window = make_cell(self._hosts[0], tf.int64, begin)
        # Zeros, or weights that not all replicas follow yet.
        self._pending = make_cell(self._hosts[0], tf.int64, ranks)
        self._wanted_length = make_cell(self._hosts[0], tf.int64, self._search.length)

    def keep_in(self, slots: Slots) -> None:
        """Save the shares with an optimizer."""
        slots.adopt(OWNER, [self.shares.weights], begins=False)

    def clock(self, replica: int) -> Clock:
        """Return a clock of the step that a replica makes."""
        return Clock(self._hosts[replica], self._measured[replica], self._clocks[replica])

    def begin(self, arguments: Any) -> None:
        """Begin to measure a step of a custom training loop.

        Args:
            arguments: arguments of the step; the rows of the first batch among them count.
        """
        local = range(len(self._hosts))
        for x in tf.nest.flatten(arguments):
            parts = x.values if isinstance(x, DistributedValues) else [x for _ in local]
            if _is_batch_of_rows(parts[0]):
                for replica in local:
                    rows = number_of_rows(parts[replica])
                    self.clock(replica).start(rows, rows, ())
                return

    def news(self, replica: int) -> News:
        """Return what a replica tells all others of the last step that it has measured."""
        return News(functools.partial(self._own, replica), functools.partial(self._follow, replica))

    def tell(self, replica: int) -> None:
        """Tell all other replicas what this one has measured, in a sum of its own."""
        news = self.news(replica)
        (total,) = sum_without_gradient([news.own()])
        news.follow(total)

    def _follow(self, replica: int, total: tf.Tensor) -> None:
        """Follow what all replicas have measured, on each worker's first replica.

        Args:
            replica: number of the replica in this process.
            total: rows, microseconds and weights of all ranks.
        """
        if replica > 0:
            return
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

        pending = tf.ensure_shape(self._pending.read(), [self._team.size])
        pending *= tf.cast(tf.reduce_any(tf.not_equal(weights, pending)), tf.int64)

        def decided() -> list[tf.Tensor]:
            found = tf.numpy_function(
                self._decide, [steps[0], *sums, weights], [tf.int64, tf.int64]
            )
            return [tf.ensure_shape(found[0], weights.shape), tf.ensure_shape(found[1], [])]

        def kept() -> list[tf.Tensor]:
            return [pending, self._wanted_length.read()]

        pending, length = tf.cond(is_full, decided, kept)
        # The next steps that others tell of were made with the shares of before.
        changes = tf.reduce_any(pending > 0)
        begins = tf.where(changes, tf.constant(-WARM_UP - self._bound, tf.int64), 0)
        fresh = tf.stack(
            [begins + tf.zeros_like(weights), tf.zeros_like(rows), tf.zeros_like(busy)]
        )
        starts_anew = tf.logical_or(is_full, changes)
        self._window.assign(tf.where(starts_anew, fresh, tf.stack([steps, *sums])))
        self._wanted_length.assign(length)
        self._pending.assign(pending)

    def _own(self, replica: int) -> tf.Tensor:
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
        self._steps += window.steps + WARM_UP * self._search.is_new
        found = self._search.decide(window, weights.tolist())
        length = np.int64(self._search.length)
        if found is None:
            return np.zeros_like(weights), length
        shares = [weight / sum(found.weights) for weight in found.weights]
        seconds = found.window.seconds.tolist()
        self.changes.append(Change(self._steps, shares, seconds, found.saves))
        _log.info("shares: %s", self.changes[-1])
        return np.array(found.weights, np.int64), length


class Clock:
    """Time that a replica computes in one step, without its waits for others.

    The clock stops while gradients are summed, and during the sums within the computation, such as
    those of batch normalization. Its state is in cells, since a step may call functions that were
    traced before, and no tensor may leave a branch.

    Args:
        host: device of the processor.
        measured: cell that gets the rows and microseconds of the step.
        state: cell for the moment since when the replica computes, for the seconds in which it has
            computed before in this step, and for its rows.
    """

    def __init__(self, host: str, measured: Cell, state: Cell) -> None:
        self._host, self._measured, self._state = host, measured, state

    def start(self, rows: tf.Tensor, total: tf.Tensor, data: Any) -> Any:
        """Begin to measure a step, once replicas have told each other their rows; return the data.

        Args:
            rows: number of rows that this replica takes.
            total: number of rows that all replicas take.
            data: structure of the tensors that the step computes with.
        """
        begin = self._now([total])
        self._state.assign(tf.stack([begin, tf.zeros_like(begin), tf.cast(rows, begin.dtype)]))
        return _after(begin, data)

    def leave_out(self, combine: Callable[[list[Any]], list[Any]], own: list[Any]) -> list[Any]:
        """Return what other replicas and this one make of some tensors, and leave out its time."""
        begin = self._now(own)
        found = combine(_after(begin, own))
        end = self._now(found)
        since, before, rows = self._read()
        self._state.assign(tf.stack([since + end - begin, before, rows]))
        return _after(end, found)  # type: ignore[no-any-return]

    def stop(self, gradients: list[Any]) -> None:
        """Note that the replica has computed its gradients."""
        now = self._now([x for x in gradients if x is not None])
        since, before, rows = self._read()
        busy = before + now - since
        micros = tf.maximum(1e6 * busy, 1)
        self._measured.assign(tf.cast(tf.stack([rows, micros]), tf.int64))
        self._state.assign(tf.stack([now, busy, rows]))

    def go_on(self, sums: list[Any], anew: bool = False) -> None:
        """Note that the replica has the sums of all gradients.

        Args:
            sums: the sums.
            anew: whether others have been told of the time until here.
        """
        now = self._now([x for x in sums if x is not None])
        _, before, rows = self._read()
        self._state.assign(tf.stack([now, tf.zeros_like(before) if anew else before, rows]))

    def _read(self) -> list[tf.Tensor]:
        return tf.unstack(tf.ensure_shape(self._state.read(), [3]))  # type: ignore[no-any-return]

    def _now(self, after: list[Any]) -> tf.Tensor:
        """Return the moment at which tensors are there."""
        flat = tf.nest.flatten(after, expand_composites=True)
        with tf.control_dependencies(flat), tf.device(self._host):
            return moment()


def _is_batch_of_rows(x: Any) -> bool:
    return tf.is_tensor(x) and not isinstance(x, tf.Variable) and x.shape.rank != 0


def _after(moment: tf.Tensor, tensors: Any) -> Any:
    """Return tensors that nobody gets before a moment: operations have no other order."""

    def later(x: Any) -> Any:
        return tf.identity(x) if tf.is_tensor(x) else x

    with tf.control_dependencies([moment]):
        return tf.nest.map_structure(later, tensors, expand_composites=True)
