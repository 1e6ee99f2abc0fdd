"""Collectives of all replicas: sums, and joined rows."""

from __future__ import annotations

import collections
import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.tensorflow import Mirrored, eager_mode, regroup, replica_id
from tfscale.collectives import Schedule, wires
from tfscale.compression.method import joined, separated
from tfscale.exchange.collective_schedules import CollectiveSchedules
from tfscale.native import (
    Communicator,
    Group,
    all_gather,
    all_reduce,
    broadcast,
    mix,
    reduce_scatter,
)
from tfscale.native.bucket import Name, bucket_id
from tfscale.native.collective import DTYPES
from tfscale.native.library import known_to_all
from tfscale.native.transport import WITHIN_PROCESS

# The ops take few types. Tensors of other types are cast to these types before they are sent.
_CARRIERS = {
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}

# Size to assume while tracing, if the size is unknown. The size is assumed to be large, because
# schedules for large buffers lose little on small ones. Schedules for small buffers can multiply
# the time of large ones.
_LIKELY_BYTES = 1 << 20

_AGAIN = 0.05  # seconds between two messages

# Joined rows may have at most this many times the bytes of a dense sum.
JOIN_UP_TO = 4

# Up to this many bytes, rows are always joined: they cost little more than any message does.
JOIN_ALWAYS = 1 << 18


class Exchange:
    """Collectives of one group, each by the schedule that suits its size.

    Args:
        group: group of the replicas; None if there is only one replica.
        schedules: schedules for all sizes.

    Attributes:
        is_measured: whether the engine's log shows what the collectives sent, and when.
        sends_rows_on_wires: whether rows of tables may be sent on a wire that loses precision.
    """

    is_measured = True
    sends_rows_on_wires = True

    def __init__(self, group: Group | None, schedules: CollectiveSchedules) -> None:
        self.communicators: list[Communicator] = group.communicators if group else []
        self.schedules = schedules
        self.ranks = group.ranks if group else 1

    def sum(
        self,
        replica: int,
        x: tf.Tensor,
        name: Name,
        wire: str = wires.LOSSLESS,
        residual: tf.Tensor | None = None,
        seed: Any = 0,
        schedule: Schedule | None = None,
    ) -> Any:
        """Return the sum of ``x`` over all ranks; with a residual, ``(sum, new_residual)``."""
        if self.ranks == 1:
            return x if residual is None else (x, residual)
        communicator = self.communicators[replica]
        return all_reduce(
            x,
            communicator,
            schedule=schedule or self._schedule(wire, x),
            wire=wire,
            residual=residual,
            seed=seed,
            name=communicator.new_bucket(name),
        )

    def _schedule(self, wire: str, x: tf.Tensor) -> Schedule:
        size = x.shape.num_elements()
        bytes_ = _LIKELY_BYTES if size is None else wire_bytes(wire, x.dtype, size)
        choice = self.schedules.choose(bytes_)
        return self.schedules.schedule(choice.algorithm)

    def sum_all(self, replica: int, tensors: Sequence[Any], name: Name) -> list[Any]:
        """Return the sums of tensors and ``IndexedSlices``, in the precision of their types."""
        sums = list(tensors)
        for dtype, positions in _by_dtype(tensors).items():
            flat = _carried(joined([tensors[i] for i in positions]))
            total = tf.cast(self.sum(replica, flat, name), dtype)
            for i, part in zip(positions, separated(total, [tensors[i] for i in positions])):
                sums[i] = part
        for i, value in enumerate(tensors):
            if isinstance(value, tf.IndexedSlices):
                sums[i] = self.sum_slices(replica, value, name)
        return sums

    def mixed(
        self,
        replica: int,
        tensors: Sequence[tf.Tensor],
        schedule: Schedule,
        name: Name,
        wire: str = wires.LOSSLESS,
        seed: Any = 0,
    ) -> list[tf.Tensor]:
        """Return this rank's result of a mixture of all ranks' floats; float64 is not rounded."""
        found = list(tensors)
        communicator = self.communicators[replica]
        for dtype, positions in _by_dtype(tensors).items():
            own = [tensors[i] for i in positions]
            bucket = communicator.new_bucket(name)
            sent = {"wire": wires.LOSSLESS if dtype == tf.float64 else wire, "seed": seed}
            one = mix(joined(own), communicator, schedule=schedule, name=bucket, **sent)
            for i, part in zip(positions, separated(one, own)):
                found[i] = part
        return found

    def sum_slices(
        self,
        replica: int,
        slices: tf.IndexedSlices,
        name: Name,
        wire: str = wires.LOSSLESS,
        seed: Any = 0,
        lost: tf.Variable | None = None,
    ) -> tf.IndexedSlices:
        """Return the sum of sparse tensors: joined rows, or a dense sum if joining costs far more.

        To join rows, a rank receives the rows of all ranks, P times as many as its own; a dense sum
        sends twice the dense tensor. A single device would have the joined rows, and some
        optimizers treat two rows differently from their sum. So rows are joined even if that costs
        somewhat more, and whenever they are few bytes.

        Args:
            replica: index of the replica in this process.
            slices: rows of a table.
            name: name of the bucket.
            wire: the format in which rows are sent.
            seed: seed for wires that round at random.
            lost: errors of earlier steps, for each row of the table. They are added to the rows
                that are sent, and the new errors of these rows replace them. Rows that occur twice
                are added up first.
        """
        if self.ranks == 1:
            return slices
        dtype = slices.dtype
        if lost is not None:
            slices = with_unique_rows(slices)
        counts = self._counts(replica, slices.indices, name)
        height = tf.cast(_height(slices), tf.int64)

        def join() -> tuple[tf.Tensor, tf.Tensor]:
            indices = self._join(replica, slices.indices, counts, name)
            if lost is None:
                return self._join(replica, slices.values, counts, name, wire, seed), indices
            owed = slices.values + tf.gather(lost, slices.indices)
            values = self._join(replica, owed, counts, name, wire, seed, feedback=True)
            rank = self.communicators[replica].rank
            first = tf.reduce_sum(counts[:rank])
            sent = values[first : first + counts[rank]]
            _remember(lost, slices.indices, owed - sent, values)
            return values, indices

        def dense() -> tuple[tf.Tensor, tf.Tensor]:
            table = tf.convert_to_tensor(slices)
            every = tf.cast(tf.range(height), slices.indices.dtype)
            if lost is None:
                return self.sum(replica, table, name, wire, seed=seed), every
            total, rest = self.sum(replica, table, name, wire, lost.read_value(), seed)
            lost.assign(rest)
            return total, every

        joined_rows = self.ranks * tf.cast(tf.reduce_max(counts), tf.int64)
        values, indices = tf.cond(joined_rows <= _most_joined(slices, height), join, dense)
        return tf.IndexedSlices(tf.cast(values, dtype), indices, slices.dense_shape)

    def sum_rows(
        self,
        replica: int,
        slices: tf.IndexedSlices,
        name: Name,
        wire: str = wires.LOSSLESS,
        seed: Any = 0,
        lost: tf.Variable | None = None,
    ) -> tf.IndexedSlices:
        """Return the sum of sparse tensors with equal rows on all replicas: see lookups.py."""
        if lost is None or self.ranks == 1:
            total = self.sum(replica, slices.values, name, wire, seed=seed)
            return tf.IndexedSlices(total, slices.indices, slices.dense_shape)
        dtype = slices.dtype
        slices = with_unique_rows(slices)
        owed = tf.gather(lost, slices.indices)
        total, rest = self.sum(replica, slices.values, name, wire, owed, seed)
        _remember(lost, slices.indices, rest, total)
        return tf.IndexedSlices(tf.cast(total, dtype), slices.indices, slices.dense_shape)

    def rows(self, replica: int, x: tf.Tensor, axis: int, name: Name = "gather") -> tf.Tensor:
        """Return all ranks' ``x``, joined along an axis in which their sizes may differ."""
        if self.ranks == 1:
            return x
        order = [axis, *(i for i in range(x.shape.rank) if i != axis)]
        back = sorted(range(len(order)), key=order.__getitem__)
        first = tf.transpose(x, order)
        counts = self._counts(replica, first, name)
        return tf.transpose(self._join(replica, first, counts, name), back)

    def from_first(self, replica: int, x: tf.Tensor, name: Name) -> tf.Tensor:
        """Return the first rank's ``x`` on all ranks."""
        if self.ranks == 1:
            return x
        communicator = self.communicators[replica]
        bucket = communicator.new_bucket(name)
        return tf.cast(broadcast(_carried(x), communicator, name=bucket), x.dtype)

    def _counts(self, replica: int, x: tf.Tensor, name: Name) -> tf.Tensor:
        rows = tf.shape(x, out_type=tf.int32)[:1]
        bucket = bucket_id(name)
        return self.gathered(replica, rows, bucket._replace(label=f"{bucket.label}: rows"))

    def _join(
        self,
        replica: int,
        x: tf.Tensor,
        counts: tf.Tensor,
        name: Name,
        wire: str = wires.LOSSLESS,
        seed: Any = 0,
        feedback: bool = False,
    ) -> tf.Tensor:
        """Return the rows of all ranks, which may give different numbers of rows.

        An all-gather needs equally many rows of each rank: pad to the largest number, and drop the
        padding.
        """
        most = tf.reduce_max(counts)
        padding = [[0, most - tf.shape(x)[0]], *([0, 0] for _ in x.shape[1:])]
        padded = tf.pad(_carried(x), padding)
        every = self.gathered(replica, padded, name, wire, seed, feedback)
        kept = tf.reshape(tf.sequence_mask(counts, most), [-1])
        return tf.cast(tf.boolean_mask(every, kept), x.dtype)

    def gathered(
        self,
        replica: int,
        x: tf.Tensor,
        name: Name,
        wire: str = wires.LOSSLESS,
        seed: Any = 0,
        feedback: bool = False,
    ) -> tf.Tensor:
        """Return the rows of all ranks, each of which must give equally many rows.

        With ``feedback``, later steps send what is lost, and numbers are rounded to the nearest, as
        in an all-reduce with a residual.
        """
        communicator = self.communicators[replica]
        bucket = communicator.new_bucket(name)
        stochastic = False if feedback else None
        return all_gather(x, communicator, wire=wire, stochastic=stochastic, seed=seed, name=bucket)

    def scattered(
        self, replica: int, x: tf.Tensor, name: Name, wire: str = wires.LOSSLESS, seed: Any = 0
    ) -> tf.Tensor:
        """Return this rank's share of the rows of the sum."""
        communicator = self.communicators[replica]
        bucket = communicator.new_bucket(name)
        return reduce_scatter(x, communicator, wire=wire, seed=seed, name=bucket)

    def ways(self, replica: int = 0) -> str:
        """Return in words how a replica's gradients reach the others.

        An example is ``"by shared memory to 1, by TCP to 2"``.
        """
        if not self.communicators:
            return ""
        own = self.communicators[replica]
        others = [way for rank, way in enumerate(own.ways()) if rank != own.rank]
        counts = collections.Counter(way.partition(" to ")[0] for way in others)
        said = ", ".join(
            f"within this process to {count}" if way == WITHIN_PROCESS else f"by {way} to {count}"
            for way, count in counts.items()
        )
        why_not = own.why_not_sockets()
        return said + (why_not and f" (not by sockets: {why_not})")

    def on_each(self, body: Callable[[int], Any]) -> list[Any]:
        """Return ``body(replica)`` for all replicas of this process.

        Eager ops wait for each other, so each replica gets a thread of its own.
        """
        replicas = range(len(self.communicators) or 1)
        if not tf.executing_eagerly() or len(replicas) == 1:
            return [body(replica) for replica in replicas]

        running = set(replicas)

        def eagerly(replica: int) -> Any:
            communicator = self.communicators[replica]
            try:
                with eager_mode(), tf.device(communicator.device):
                    return body(replica)
            except Exception as error:
                running.discard(replica)
                if not known_to_all(error):
                    self._give_up(communicator, error, running)
                raise
            finally:
                running.discard(replica)

        with concurrent.futures.ThreadPoolExecutor(len(replicas)) as threads:
            done = [threads.submit(eagerly, replica) for replica in replicas]
        errors = [error for one in done if (error := one.exception()) is not None]
        if errors:
            raise min(errors, key=known_to_all)  # the cause, rather than an error that it caused
        return [one.result() for one in done]

    def _give_up(self, communicator: Communicator, error: Exception, running: set[int]) -> None:
        """End the exchanges of all other ranks.

        A replica of this process that has not begun its exchange yet does not get the message,
        because the engine assumes that ranks of one process fail together. So this method sends the
        message again as long as one of these replicas runs.
        """
        while True:
            communicator.give_up(failure(error))
            if not running:
                return
            time.sleep(_AGAIN)

    def together(
        self, body: Callable[[int, list[Any]], list[Any]], tensors: list[Any]
    ) -> list[Any]:
        """Return ``body(replica, tensors)``; a replica calls this method.

        In a graph ``body`` runs at once. Eager replicas run one after the other, so they
        first wait for each other.
        """
        context = tf.distribute.get_replica_context()
        if not tf.executing_eagerly() or self.ranks == 1:
            return body(replica_id(context), tensors)

        def meet(strategy: tf.distribute.Strategy, *values: Any) -> Any:
            local = [_of_each_replica(strategy, value) for value in values]
            each = self.on_each(lambda replica: body(replica, [v[replica] for v in local]))
            return tuple(regroup(parts, wrap_class=Mirrored) for parts in zip(*each))

        return list(context.merge_call(meet, args=tuple(tensors)))


def failure(error: Exception) -> str:
    """Return the message that other ranks receive about an error between two collectives."""
    return f"its step failed: {type(error).__name__}: {error}"


def wire_bytes(wire: str, dtype: tf.DType, size: int) -> int:
    """Return the number of bytes that ``size`` numbers take on a wire, at least 1."""
    return max(1, size * dtype.size if wire == wires.LOSSLESS else wires.nbytes(wire, size))


def _by_dtype(tensors: Sequence[Any]) -> dict[tf.DType, list[int]]:
    found: dict[tf.DType, list[int]] = {}
    for i, x in enumerate(tensors):
        if not isinstance(x, tf.IndexedSlices):
            found.setdefault(x.dtype, []).append(i)
    return found


def _of_each_replica(strategy: tf.distribute.Strategy, value: Any) -> tuple[Any, ...]:
    """Return the values of the local replicas; if they share one object, repeat it for each."""
    found: tuple[Any, ...] = strategy.experimental_local_results(value)
    return found if len(found) > 1 else found * len(strategy.extended.worker_devices)


def can_exchange(dtype: tf.DType) -> bool:
    """Return whether replicas can send each other numbers of this type."""
    return dtype in DTYPES or dtype in _CARRIERS


def _carried(x: tf.Tensor) -> tf.Tensor:
    if not can_exchange(x.dtype):
        raise TypeError(
            f"replicas can exchange only numbers, not {x.dtype.name}: convert the values to numbers"
        )
    return tf.cast(x, _CARRIERS.get(x.dtype, x.dtype))


def with_unique_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return unique rows in float32 or wider: rows that occur several times are added up."""
    indices, places = tf.unique(slices.indices)
    values = slices.values
    values = tf.cast(values, tf.float32) if values.dtype.size < 4 else values
    values = tf.math.unsorted_segment_sum(values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _most_joined(slices: tf.IndexedSlices, height: tf.Tensor) -> tf.Tensor:
    """Return the largest number of rows to join, for a table of this height."""
    width = slices.values.shape[1:].num_elements()
    always = JOIN_ALWAYS // (width * slices.dtype.size) if width else 0
    return tf.maximum(JOIN_UP_TO * 2 * height, always)


def _remember(table: tf.Variable, rows: tf.Tensor, lost: tf.Tensor, sums: tf.Tensor) -> None:
    """Store in the table what the rows have lost, unless a sum is not finite.

    In that case the table stays as it was, because the step may be undone.
    """
    finite = tf.reduce_all(tf.math.is_finite(sums))
    lost = tf.where(finite, lost, tf.gather(table, rows))
    table.scatter_update(tf.IndexedSlices(lost, rows))


def _height(slices: tf.IndexedSlices) -> Any:
    if slices.dense_shape is None:
        raise ValueError("a sparse gradient without a dense shape cannot be reduced")
    return slices.dense_shape[0]
