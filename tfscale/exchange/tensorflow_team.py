"""A team that runs TensorFlow's own collectives: TensorFlow's ring on CPUs, NCCL on GPUs."""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale.bridge.calls import is_in_a_loop_of_a_replica
from tfscale.collectives import Schedule, wires
from tfscale.collectives.choose import Choice
from tfscale.exchange.collective_schedules import Fixed
from tfscale.exchange.lost_ranks import LostRanks, end_collectives
from tfscale.exchange.team import Team, failure
from tfscale.native import Communicator, Group, all_reduce
from tfscale.native.bucket import Name, bucket_id

# Types in which numbers are sent; "fp32" sends numbers in their own type.
WIRES = {wires.LOSSLESS: None, "bf16": tf.bfloat16, "fp16": tf.float16}
NAME = "tensorflow"

_RING, _NCCL = "ring", "nccl"
_SOON = 1.0  # seconds to wait for other replicas that fail for the same reason

# Bits of TensorFlow's keys for collectives. A key holds a bit that says whether the size is fixed,
# the bucket's number, and, if the size is not fixed, the class of the size.
_KEY_BITS, _CLASS_BITS = 30, 8


class TensorFlowTeam(Team):
    """A team that runs TensorFlow's collectives; the engine does all that is not a collective.

    Args:
        group: group of the replicas; None if there is only one replica.
    """

    is_measured = False
    sends_rows_on_wires = False

    def __init__(self, group: Group | None) -> None:
        hint = _NCCL if group and _have_gpus_of_their_own(group) else _RING
        super().__init__(group, _ByTensorFlow(hint, group.ranks if group else 1))
        self._engines = self.schedules.schedule("ring")
        self._hint = hint
        self._orders = [_order(communicator) for communicator in self.communicators]
        self._buckets: dict[tuple[int, int], str] = {}
        self._places = self._places_of_ranks(group) if group else []
        if group and len(self.communicators) < self.size:
            LostRanks(self.communicators).start()

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
        """Return the sum of ``x`` over all ranks."""
        assert residual is None and wire in WIRES, "backends.py refuses these"
        if self.size == 1:
            return x
        if self._is_in_a_loop():
            return super().sum(replica, x, name, wire, schedule=self._engines)

        @tf.custom_gradient
        def summed(x: tf.Tensor) -> Any:
            def gradient(dy: tf.Tensor) -> tf.Tensor:
                return self.sum(replica, dy, _gradient_of(name), wire)

            return self._sum(replica, x, name, wire), gradient

        return summed(x)

    def _sum(self, replica: int, x: tf.Tensor, name: Name, wire: str) -> tf.Tensor:
        wide = _wide(x.dtype)
        carrier = WIRES[wire] or wide
        if carrier != tf.float16:
            return tf.cast(self._reduce(replica, tf.cast(x, carrier), name), x.dtype)
        scale = tf.cast(self._scale(replica, x, name), wide)
        total = self._reduce(replica, tf.cast(tf.cast(x, wide) * scale, carrier), name)
        return tf.cast(tf.cast(total, wide) / scale, x.dtype)

    def _scale(self, replica: int, x: tf.Tensor, name: Name) -> tf.Tensor:
        r"""Return the largest power of two with which the sum of float16 numbers cannot overflow.

        If the largest number of all ranks is below :math:`2^{e+1}`, a sum of P numbers is below
        :math:`2^{e+1} P`. Times the scale, this sum must be at most :math:`2^{15}`.
        """
        largest = tf.reduce_max(tf.abs(tf.cast(x, tf.float32)))
        bucket = bucket_id(name)
        name = bucket._replace(label=f"{bucket.label}: largest")
        largest = self._reduce(replica, tf.maximum(largest, 0.0), name, "Max")
        exponent = tf.bitwise.right_shift(tf.bitcast(largest, tf.int32), 23) - 127
        power = 15 - (exponent + 1) - math.ceil(math.log2(self.size))
        power = tf.where(exponent == 128, 0, tf.clip_by_value(power, -126, 126))  # 128: infinite
        return tf.bitcast(tf.bitwise.left_shift(power + 127, 23), tf.float32)

    def _is_in_a_loop(self) -> bool:
        """Return whether each replica of this process runs a loop of its own.

        TensorFlow takes collectives in different loops for different collectives, which would wait
        for each other forever.
        """
        return len(self.communicators) > 1 and is_in_a_loop_of_a_replica()

    def _give_up(self, communicator: Communicator, error: Exception, running: set[int]) -> None:
        until = time.monotonic() + _SOON
        while running and time.monotonic() < until:  # the others may fail for the same reason
            time.sleep(_SOON / 20)
        if running:
            end_collectives(tf.errors.CANCELLED, failure(error))
        super()._give_up(communicator, error, running)

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
        """Return the rows of all ranks, each of which must give equally many rows."""
        assert wire == wires.LOSSLESS, "backends.py refuses others"
        if self._is_in_a_loop():
            return super().gather(replica, x, name)

        @tf.custom_gradient
        def gathered(x: tf.Tensor) -> Any:
            rows, rank = tf.shape(x)[0], self.communicators[replica].rank

            def gradient(dy: tf.Tensor) -> tf.Tensor:
                total = self.sum(replica, dy, _gradient_of(name))
                return total[rank * rows : (rank + 1) * rows]

            return self._gather(replica, x, name), gradient

        return gathered(x)

    def scatter(
        self,
        replica: int,
        x: tf.Tensor,
        name: Name,
        wire: str = wires.LOSSLESS,
        seed: Any = 0,
        residual: tf.Tensor | None = None,
    ) -> Any:
        """Return this rank's share of the rows of the sum."""
        assert residual is None, "backends.py refuses feedback"
        if x.shape[0] is None or x.shape[0] % self.size:
            raise ValueError(
                f"reduce_scatter cannot divide {x.shape[0]} rows among {self.size} replicas. Pass "
                f"a tensor whose number of rows is known and a multiple of {self.size}"
            )
        share = x.shape[0] // self.size
        rank = self.communicators[replica].rank
        return self.sum(replica, x, name, wire)[rank * share : (rank + 1) * share]

    # -- TensorFlow's ops, on vectors

    def _reduce(self, replica: int, x: tf.Tensor, name: Name, merge: str = "Add") -> tf.Tensor:
        vector, size, size_class = _padded(tf.reshape(x, [-1]))
        with self._when_all_are_there(replica, x, name):
            total = tf.raw_ops.CollectiveReduceV2(
                input=vector,
                merge_op=merge,
                final_op="Id",
                **self._common(replica, f"{merge} {x.dtype.name}", name, size, size_class),
            )
        return tf.reshape(total[:size], tf.shape(x))

    def _places_of_ranks(self, group: Group) -> list[int]:
        """Return the place of each rank's part in the result of TensorFlow's gather.

        TensorFlow sorts devices by their names: the tenth worker comes before the second.
        """
        self._places = list(range(self.size))
        numbers = group.function(
            lambda c: self._gather(
                c.rank - group.communicators[0].rank, tf.constant([c.rank]), "ranks"
            )
        )()[0].numpy()
        return [int(place) for place in numbers.argsort()]

    def _gather(self, replica: int, x: tf.Tensor, name: Name) -> tf.Tensor:
        dtype = x.dtype
        if dtype == tf.bfloat16:  # TensorFlow's gather does not take it
            x = tf.cast(x, tf.float32)
        vector, size, size_class = _padded(tf.reshape(x, [-1]))
        with self._when_all_are_there(replica, x, name):
            every = tf.raw_ops.CollectiveGatherV2(
                input=vector,
                **self._common(replica, f"gather {x.dtype.name}", name, size, size_class),
            )
        parts = tf.gather(tf.reshape(every, [self.size, -1]), self._places)[:, :size]
        shape = tf.concat([[self.size * tf.shape(x)[0]], tf.shape(x)[1:]], 0)
        return tf.cast(tf.reshape(parts, shape), dtype)

    @contextlib.contextmanager
    def _when_all_are_there(self, replica: int, x: tf.Tensor, name: Name) -> Iterator[None]:
        """Place the context's ops on the rank's device, to run once all ranks have come this far.

        TensorFlow's collectives have no timeout and name no rank in errors. The engine's have both,
        so all ranks first exchange a number by the engine.
        """
        communicator, bucket = self.communicators[replica], bucket_id(name)
        size = x.shape.num_elements() or "some"
        label = f"{bucket.label}: all are there with {size} numbers"
        arrival = communicator.new_bucket(bucket._replace(label=label))
        with tf.device(communicator.device), tf.control_dependencies([x]):
            there = all_reduce(tf.zeros([1]), communicator, schedule="tree", name=arrival)
        after = [] if tf.executing_eagerly() else [there]
        with tf.device(communicator.device), tf.control_dependencies(after):
            yield

    def _common(
        self, replica: int, what: str, name: Name, size: Any, size_class: Any
    ) -> dict[str, Any]:
        communicator = self.communicators[replica]
        bucket = f"{what} {communicator.new_bucket(name)}"
        return {
            "group_size": self.size,
            "group_key": communicator.group_key,
            "instance_key": self._key(bucket, size, size_class),
            # TensorFlow runs ops that share a resource in the order of the trace. Without this
            # token, ranks may begin with different collectives, and wait for each other forever.
            "ordering_token": [self._orders[replica]],
            "communication_hint": self._hint,
            # There is no timeout here. For each collective with a timeout, TensorFlow makes a
            # thread that sleeps until the timeout, however soon the collective is done.
        }

    def _key(self, bucket: str, size: Any, size_class: Any) -> Any:
        if size_class is None:
            return self._number(f"{bucket} of {size}", _KEY_BITS)
        number = self._number(bucket, _KEY_BITS - _CLASS_BITS)
        return (1 << _KEY_BITS | number << _CLASS_BITS) + size_class

    def ways(self, replica: int = 0) -> str:
        """Return how gradients are sent, in words; an empty text if there is one rank."""
        return f"by {self.schedules.choose(0).algorithm}" if self.size > 1 else ""

    def _number(self, bucket: str, bits: int) -> int:
        """Return a bucket's number, equal on all ranks.

        All ranks meet the same buckets in the same order.
        """
        number = zlib.crc32(bucket.encode()) % (1 << bits)
        while self._buckets.setdefault((number, bits), bucket) != bucket:
            number = (number + 1) % (1 << bits)
        return number


class _ByTensorFlow(Fixed):
    """Placeholder for schedules: TensorFlow chooses its own."""

    def __init__(self, hint: str, ranks: int) -> None:
        super().__init__("ring", ranks)
        self._name = {_RING: "TensorFlow's ring", _NCCL: "NCCL"}[hint]

    def choose(self, wire_bytes: int) -> Choice:
        """Return the name of TensorFlow's algorithm as the choice, whatever the size."""
        return Choice(self._name, 0.0, None, None, f'backend="{NAME}"')


def _have_gpus_of_their_own(group: Group) -> bool:
    """Return whether all ranks run on GPUs, each on a GPU of its own.

    NCCL refuses two ranks on one GPU, and two logical devices may be on one GPU.
    """
    on_gpus = all(":GPU:" in device for device in group.communicators[0].devices)
    physical, logical = tf.config.list_physical_devices, tf.config.list_logical_devices
    return on_gpus and len(physical("GPU")) == len(logical("GPU"))


def _order(communicator: Communicator) -> tf.Tensor:
    name = f"tfscale_order_{communicator.group_key}_{communicator.rank}"
    with tf.init_scope(), tf.device(communicator.device):
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=name)


def _wide(dtype: tf.DType) -> tf.DType:
    """Return the type in which numbers are added: float32 for 16 bits, as in the engine."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def _gradient_of(name: Name) -> Name:
    bucket = bucket_id(name)
    return bucket._replace(label=f"gradient of {bucket.label}")


def _padded(vector: tf.Tensor) -> tuple[tf.Tensor, Any, Any]:
    """Return the padded vector, its size before, and the size's class; None if the size is fixed.

    TensorFlow remembers the size of each collective that it has met, and refuses another size; with
    a size of 0, TensorFlow crashes. So sizes that are unknown while tracing are rounded up to one
    of eight sizes per power of two, and each of these classes is a collective of its own.
    """
    fixed = vector.shape.num_elements()
    if fixed:
        return vector, fixed, None
    size = tf.size(vector)
    # The highest bits of a float64 hold its exponent and the first three bits of its fraction.
    bits = tf.bitcast(tf.cast(tf.maximum(size, 1), tf.float64), tf.int64)
    rounded = tf.bitwise.right_shift(bits + (1 << 49) - 1, 49)
    room = tf.cast(tf.bitcast(tf.bitwise.left_shift(rounded, 49), tf.float64), tf.int32)
    size_class = tf.cast(rounded - (1023 << 3), tf.int32)
    return tf.pad(vector, [[0, room - size]]), size, size_class
