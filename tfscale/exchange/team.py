"""Teams: replicas that do one thing together, such as sum numbers."""

from __future__ import annotations

import collections
import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.tensorflow import Mirrored, eager_mode, regroup, replica_id
from tfscale.collectives import Schedule, wires
from tfscale.collectives.halves import has_halves
from tfscale.collectives.registry import resolve
from tfscale.compression.method import joined, separated
from tfscale.exchange.collective_schedules import CollectiveSchedules
from tfscale.native import (
    Communicator,
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    mix,
    reduce_scatter,
    transfer,
)
from tfscale.native.bucket import Name, bucket_id
from tfscale.native.collective import DTYPES
from tfscale.native.library import known_to_all
from tfscale.native.transport import WITHIN_PROCESS

# The ops take few types. Tensors of other types are cast to these types before they are sent.
_CARRIERS = {
    **dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),
}

# Size to assume while tracing, if the size is unknown. The size is assumed to be large, because
# schedules for large buffers lose little on small ones. Schedules for small buffers can multiply
# the time of large ones.
_LIKELY_BYTES = 1 << 20

_AGAIN = 0.05  # seconds between two messages


class Team:
    r"""Replicas that do one thing together: all replicas, a group, or one alone.

    Each of the P replicas of a team calls the same methods in the same order, with the same names.
    With :math:`x_r` from the replica of rank r, ``sum`` gives :math:`\sum_r x_r` to all, with the
    same bits; ``gather`` gives :math:`(x_0, ..., x_{P-1})` to all; ``scatter`` gives the r-th part
    of the sum to rank r; ``mix`` gives each rank a sum of some ranks' numbers, with weights;
    ``all_to_all`` gives rank r the r-th part of each :math:`x`. Only of a ``transfer`` the other
    ranks know nothing: its source gives its :math:`x` to its target.

    This class runs the engine's collectives, each by the schedule that suits its size.

    Args:
        group: group of the replicas; None if there is only one replica.
        schedules: schedules for all sizes.

    Attributes:
        communicators: communicators of this process's replicas.
        size: number of replicas.
        is_measured: whether the engine's log shows what the collectives sent, and when.
        sends_rows_on_wires: whether rows of tables may be sent on a wire that loses precision.
    """

    is_measured = True
    sends_rows_on_wires = True

    def __init__(self, group: Group | None, schedules: CollectiveSchedules) -> None:
        self.communicators: list[Communicator] = group.communicators if group else []
        self.schedules = schedules
        self.size = group.ranks if group else 1

    def rank(self, replica: int) -> int:
        """Return the rank in the team of a replica of this process."""
        return self.communicators[replica].rank

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
        if self.size == 1:
            return x if residual is None else (x, residual)
        communicator = self.communicators[replica]
        return all_reduce(
            x,
            communicator,
            schedule=schedule or self.schedule(wire, x),
            wire=wire,
            residual=residual,
            seed=seed,
            name=communicator.new_bucket(name),
        )

    def schedule(self, wire: str, x: tf.Tensor) -> Schedule:
        """Return the schedule by which to sum ``x`` on a wire."""
        size = x.shape.num_elements()
        bytes_ = _LIKELY_BYTES if size is None else wire_bytes(wire, x.dtype, size)
        return self.schedules.schedule(self.schedules.choose(bytes_).algorithm)

    def sum_all(self, replica: int, tensors: Sequence[tf.Tensor], name: Name) -> list[tf.Tensor]:
        """Return the sums of tensors, in the precision of their types; one sum for each type."""

        def total(x: tf.Tensor) -> tf.Tensor:
            return tf.cast(self.sum(replica, _carried(x), name), x.dtype)

        return _by_dtype(tensors, total)

    def mix(
        self,
        replica: int,
        tensors: Sequence[tf.Tensor],
        schedule: Schedule,
        name: Name,
        wire: str = wires.LOSSLESS,
        seed: Any = 0,
    ) -> list[tf.Tensor]:
        """Return this rank's result of a mixture of all ranks' floats; float64 is not rounded."""
        communicator = self.communicators[replica]

        def mixed(x: tf.Tensor) -> tf.Tensor:
            bucket = communicator.new_bucket(name)
            on = wires.LOSSLESS if x.dtype == tf.float64 else wire
            return mix(x, communicator, schedule=schedule, name=bucket, wire=on, seed=seed)

        return _by_dtype(tensors, mixed)

    def gather(
        self,
        replica: int,
        x: tf.Tensor,
        name: Name,
        wire: str = wires.LOSSLESS,
        seed: Any = 0,
        feedback: bool = False,
        schedule: Schedule | str = "ring",
    ) -> tf.Tensor:
        """Return the rows of all ranks, each of which must give equally many rows.

        With ``feedback``, later steps send what is lost, and numbers are rounded to the nearest, as
        in an all-reduce with a residual.
        """
        communicator = self.communicators[replica]
        bucket = communicator.new_bucket(name)
        return all_gather(
            x,
            communicator,
            schedule=schedule,
            wire=wire,
            stochastic=False if feedback else None,
            seed=seed,
            name=bucket,
        )

    def scatter(
        self,
        replica: int,
        x: tf.Tensor,
        name: Name,
        wire: str = wires.LOSSLESS,
        seed: Any = 0,
        residual: tf.Tensor | None = None,
    ) -> Any:
        """Return this rank's share of the rows of the sum; with a residual, the new one, too."""
        communicator = self.communicators[replica]
        return reduce_scatter(
            x,
            communicator,
            schedule=self.halved(wire, x),
            wire=wire,
            residual=residual,
            seed=seed,
            name=communicator.new_bucket(name),
        )

    def halved(self, wire: str, x: tf.Tensor) -> Schedule:
        """Return the schedule whose halves share out and join sums of this size.

        It is the schedule that would sum ``x``, if that has halves, else the ring.
        """
        whole = self.schedule(wire, x)
        return whole if has_halves(whole) else resolve("ring", self.size)

    def broadcast(self, replica: int, x: tf.Tensor, name: Name, root: int = 0) -> tf.Tensor:
        """Return the ``x`` of one rank, by default the first, on all ranks."""
        if self.size == 1:
            return x
        communicator = self.communicators[replica]
        bucket = communicator.new_bucket(name)
        return tf.cast(broadcast(_carried(x), communicator, root=root, name=bucket), x.dtype)

    def transfer(self, replica: int, x: Any, source: int, target: int, name: Name) -> tf.Tensor:
        """Return the source's ``x`` on the target; only the replicas of these ranks call this.

        The source does not wait for the target, and no gradient goes back.

        Args:
            replica: index of the replica in this process.
            x: tensor to send; on the target a tensor, or a ``tf.TensorSpec``, like it.
            source: rank that sends.
            target: rank that receives.
            name: name of the transfer, which no other transfer of the step has.
        """
        communicator = self.communicators[replica]
        bucket = communicator.new_bucket(name)
        return transfer(x, communicator, source=source, target=target, name=bucket)

    def all_to_all(
        self, replica: int, x: tf.Tensor, name: Name, sizes: Any = None, received: Any = None
    ) -> Any:
        """Return the rows that all ranks have for this one, in the order of ranks.

        Args:
            replica: index of the replica in this process.
            x: rows of this rank, first those for rank 0.
            name: name of the bucket.
            sizes: numbers of rows for each rank; by default all ranks get equally many. With
                ``sizes``, this returns the rows and the number of rows from each rank.
            received: numbers of rows from each rank, if all ranks know them.
        """
        if self.size == 1:
            return x if sizes is None else (x, sizes)
        communicator = self.communicators[replica]
        bucket = communicator.new_bucket(name)
        return all_to_all(x, communicator, sizes=sizes, received=received, name=bucket)

    def concat(self, replica: int, x: tf.Tensor, axis: int, name: Name = "gather") -> tf.Tensor:
        """Return all ranks' ``x``, joined along an axis in which their sizes may differ."""
        if self.size == 1:
            return x
        order = [axis, *(i for i in range(x.shape.rank) if i != axis)]
        back = sorted(range(len(order)), key=order.__getitem__)
        first = tf.transpose(x, order)
        counts = self.count_rows(replica, first, name)
        return tf.transpose(self.join(replica, first, counts, name), back)

    def count_rows(self, replica: int, x: tf.Tensor, name: Name) -> tf.Tensor:
        """Return how many rows the ``x`` of each rank has."""
        rows = tf.shape(x, out_type=tf.int32)[:1]
        bucket = bucket_id(name)
        return self.gather(replica, rows, bucket._replace(label=f"{bucket.label}: rows"))

    def join(
        self, replica: int, x: tf.Tensor, counts: tf.Tensor, name: Name, **how: Any
    ) -> tf.Tensor:
        """Return the rows of all ranks, which may give different numbers of rows.

        An all-gather needs equally many rows of each rank: pad to the largest number, and drop the
        padding.

        Args:
            replica: index of the replica in this process.
            x: rows of this rank.
            counts: numbers of rows of all ranks.
            name: name of the bucket.
            how: further arguments of ``gather``.
        """
        most = tf.reduce_max(counts)
        padding = [[0, most - tf.shape(x)[0]], *([0, 0] for _ in x.shape[1:])]
        every = self.gather(replica, tf.pad(_carried(x), padding), name, **how)
        kept = tf.reshape(tf.sequence_mask(counts, most), [-1])
        return tf.cast(tf.boolean_mask(every, kept), x.dtype)

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
        """End the collectives of all other ranks.

        A replica of this process that has not begun its collective yet does not get the message,
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
        if not tf.executing_eagerly() or self.size == 1:
            return body(replica_id(context), tensors)

        def meet(strategy: tf.distribute.Strategy, *values: Any) -> Any:
            local = [_of_each_replica(strategy, value) for value in values]
            each = self.on_each(lambda replica: body(replica, [v[replica] for v in local]))
            return tuple(regroup(parts, wrap_class=Mirrored) for parts in zip(*each))

        return list(context.merge_call(meet, args=tuple(tensors)))

    def together_on_one(self, body: Callable[[int, Any], Any], tensor: Any) -> Any:
        """Return ``body(replica, tensor)``, as ``together`` does for several tensors."""
        (found,) = self.together(lambda replica, own: [body(replica, own[0])], [tensor])
        return found


def failure(error: Exception) -> str:
    """Return the message that other ranks receive about an error between two collectives."""
    return f"its step failed: {type(error).__name__}: {error}"


def wire_bytes(wire: str, dtype: tf.DType, size: int) -> int:
    """Return the number of bytes that ``size`` numbers take on a wire, at least 1."""
    return max(1, size * dtype.size if wire == wires.LOSSLESS else wires.nbytes(wire, size))


def can_exchange(dtype: tf.DType) -> bool:
    """Return whether replicas can send each other numbers of this type."""
    return dtype in DTYPES or dtype in _CARRIERS


def _by_dtype(
    tensors: Sequence[tf.Tensor], body: Callable[[tf.Tensor], tf.Tensor]
) -> list[tf.Tensor]:
    """Return tensors after ``body`` has changed them, joined to one vector for each type."""
    found = list(tensors)
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        places = [i for i, x in enumerate(tensors) if x.dtype == dtype]
        own = [tensors[i] for i in places]
        for i, part in zip(places, separated(body(joined(own)), own)):
            found[i] = part
    return found


def _of_each_replica(strategy: tf.distribute.Strategy, value: Any) -> tuple[Any, ...]:
    """Return the values of the local replicas; if they share one object, repeat it for each."""
    found: tuple[Any, ...] = strategy.experimental_local_results(value)
    return found if len(found) > 1 else found * len(strategy.extended.worker_devices)


def _carried(x: tf.Tensor) -> tf.Tensor:
    if not can_exchange(x.dtype):
        raise TypeError(
            f"replicas cannot exchange values of type {x.dtype.name}, only numbers. Convert the "
            "values to numbers"
        )
    return tf.cast(x, _CARRIERS.get(x.dtype, x.dtype))
