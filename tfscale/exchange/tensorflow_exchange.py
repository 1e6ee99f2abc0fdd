"""The same exchange by TensorFlow's own collectives: its ring on CPUs, NCCL on GPUs."""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfscale import wires
from tfscale.bridge.calls import is_in_a_loop_of_a_replica
from tfscale.collectives import Schedule
from tfscale.collectives.choose import Choice
from tfscale.exchange.collective_schedules import Fixed
from tfscale.exchange.exchange import Exchange, failure
from tfscale.exchange.lost_ranks import LostRanks, end_collectives
from tfscale.ops import Communicator, Group, all_reduce
from tfscale.ops.bucket import Name, bucket_id

# What a number is on the way; "fp32" sends it as it is.
WIRES = {wires.LOSSLESS: None, "bf16": tf.bfloat16, "fp16": tf.float16}
NAME = "tensorflow"

_RING, _NCCL = "ring", "nccl"
_SOON = 1.0  # seconds

# The bits of a key of TensorFlow's: one that says whether the size is fixed; a bucket's number; and
# where the size is not fixed, its class.
_KEY_BITS, _CLASS_BITS = 30, 8


class TensorFlowExchange(Exchange):
    """See the module. What an exchange needs beside collectives stays with the engine.

    Args:
        group: who takes part; None if there is nobody else.
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
        if group and len(self.communicators) < self.ranks:
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
        """The sum of ``x`` over all ranks."""
        assert residual is None and wire in WIRES, "backends.py refuses these"
        if self.ranks == 1:
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
        r"""The largest power of two with which the sum of halves cannot overflow.

        With the largest number of all ranks below :math:`2^{e+1}`, a sum of P of them is below
        :math:`2^{e+1} P`: times the scale it shall be at most :math:`2^{15}`.
        """
        largest = tf.reduce_max(tf.abs(tf.cast(x, tf.float32)))
        bucket = bucket_id(name)
        name = bucket._replace(label=f"{bucket.label}: largest")
        largest = self._reduce(replica, tf.maximum(largest, 0.0), name, "Max")
        exponent = tf.bitwise.right_shift(tf.bitcast(largest, tf.int32), 23) - 127
        power = 15 - (exponent + 1) - math.ceil(math.log2(self.ranks))
        power = tf.where(exponent == 128, 0, tf.clip_by_value(power, -126, 126))  # 128: infinite
        return tf.bitcast(tf.bitwise.left_shift(power + 127, 23), tf.float32)

    def _is_in_a_loop(self) -> bool:
        """Where each replica of this process has a loop of its own. TensorFlow takes collectives of
        different loops for different ones: they would wait for each other forever.
        """
        return len(self.communicators) > 1 and is_in_a_loop_of_a_replica()

    def _give_up(self, communicator: Communicator, error: Exception, running: set[int]) -> None:
        until = time.monotonic() + _SOON
        while running and time.monotonic() < until:  # the others may fail for the same reason
            time.sleep(_SOON / 20)
        if running:
            end_collectives(tf.errors.CANCELLED, failure(error))
        super()._give_up(communicator, error, running)

    def gathered(
        self,
        replica: int,
        x: tf.Tensor,
        name: Name,
        wire: str = wires.LOSSLESS,
        seed: Any = 0,
        feedback: bool = False,
    ) -> tf.Tensor:
        """The rows of all ranks, of which each has as many."""
        assert wire == wires.LOSSLESS, "backends.py refuses others"
        if self._is_in_a_loop():
            return super().gathered(replica, x, name)

        @tf.custom_gradient
        def gathered(x: tf.Tensor) -> Any:
            rows, rank = tf.shape(x)[0], self.communicators[replica].rank

            def gradient(dy: tf.Tensor) -> tf.Tensor:
                total = self.sum(replica, dy, _gradient_of(name))
                return total[rank * rows : (rank + 1) * rows]

            return self._gather(replica, x, name), gradient

        return gathered(x)

    def scattered(
        self, replica: int, x: tf.Tensor, name: Name, wire: str = wires.LOSSLESS, seed: Any = 0
    ) -> tf.Tensor:
        """This rank's share of the rows of the sum."""
        if x.shape[0] is None or x.shape[0] % self.ranks:
            raise ValueError(
                f"reduce_scatter shares {x.shape[0]} rows out over {self.ranks} replicas: give a "
                "tensor whose number of rows is known and a multiple of theirs"
            )
        share = x.shape[0] // self.ranks
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
        """In which place of what TensorFlow gathers each rank's part is: it sorts devices by names,
        the tenth worker's before the second's.
        """
        self._places = list(range(self.ranks))
        numbers = group.function(
            lambda c: self._gather(
                c.rank - group.communicators[0].rank, tf.constant([c.rank]), "ranks"
            )
        )()[0].numpy()
        return [int(place) for place in numbers.argsort()]

    def _gather(self, replica: int, x: tf.Tensor, name: Name) -> tf.Tensor:
        dtype = x.dtype
        if dtype == tf.bfloat16:  # which TensorFlow's does not take
            x = tf.cast(x, tf.float32)
        vector, size, size_class = _padded(tf.reshape(x, [-1]))
        with self._when_all_are_there(replica, x, name):
            every = tf.raw_ops.CollectiveGatherV2(
                input=vector,
                **self._common(replica, f"gather {x.dtype.name}", name, size, size_class),
            )
        parts = tf.gather(tf.reshape(every, [self.ranks, -1]), self._places)[:, :size]
        shape = tf.concat([[self.ranks * tf.shape(x)[0]], tf.shape(x)[1:]], 0)
        return tf.cast(tf.reshape(parts, shape), dtype)

    @contextlib.contextmanager
    def _when_all_are_there(self, replica: int, x: tf.Tensor, name: Name) -> Iterator[None]:
        """On the rank's device, and once all ranks have come as far as this.

        TensorFlow's collectives have no deadline and name nobody. The engine does: so all ranks
        first exchange a number by it.
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
            "group_size": self.ranks,
            "group_key": communicator.group_key,
            "instance_key": self._fixed_key(f"{bucket} of {size}")
            if size_class is None
            else self._class_key(bucket, size_class),
            # TensorFlow runs what shares a resource in the order of the trace. Without it, ranks
            # may begin with different collectives, and wait for each other forever.
            "ordering_token": [self._orders[replica]],
            "communication_hint": self._hint,
            # Without TensorFlow's timeout: for each collective with one it makes a thread, which
            # sleeps until then, however soon the collective is done.
        }

    def _fixed_key(self, bucket: str) -> int:
        return self._number(bucket, _KEY_BITS)

    def _class_key(self, bucket: str, size_class: tf.Tensor) -> tf.Tensor:
        number = self._number(bucket, _KEY_BITS - _CLASS_BITS)
        return (1 << _KEY_BITS | number << _CLASS_BITS) + size_class

    def ways(self, replica: int = 0) -> str:
        """In words."""
        return f"by {self.schedules.choose(0).algorithm}" if self.ranks > 1 else ""

    def _number(self, bucket: str, bits: int) -> int:
        """The same on all ranks, which meet the same buckets in the same order."""
        number = zlib.crc32(bucket.encode()) % (1 << bits)
        while self._buckets.setdefault((number, bits), bucket) != bucket:
            number = (number + 1) % (1 << bits)
        return number


class _ByTensorFlow(Fixed):
    """No schedule of ours."""

    def __init__(self, hint: str, ranks: int) -> None:
        super().__init__("ring", ranks)
        self._name = {_RING: "TensorFlow's ring", _NCCL: "NCCL"}[hint]

    def choose(self, wire_bytes: int) -> Choice:
        """What TensorFlow does."""
        return Choice(self._name, 0.0, None, None, f'backend="{NAME}"')


def _have_gpus_of_their_own(group: Group) -> bool:
    """NCCL refuses two ranks on one GPU, which logical devices may be."""
    on_gpus = all(":GPU:" in device for device in group.communicators[0].devices)
    physical, logical = tf.config.list_physical_devices, tf.config.list_logical_devices
    return on_gpus and len(physical("GPU")) == len(logical("GPU"))


def _order(communicator: Communicator) -> tf.Tensor:
    name = f"tfscale_order_{communicator.group_key}_{communicator.rank}"
    with tf.init_scope(), tf.device(communicator.device):
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=name)


def _wide(dtype: tf.DType) -> tf.DType:
    """In which type numbers are added without loss: halves as float32, as the engine does."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def _gradient_of(name: Name) -> Name:
    bucket = bucket_id(name)
    return bucket._replace(label=f"gradient of {bucket.label}")


def _padded(vector: tf.Tensor) -> tuple[tf.Tensor, Any, Any]:
    """The vector, its size before, and the class of its size; None if the size is fixed.

    TensorFlow remembers the size of each collective that it has met and refuses another one; and
    with a size of 0 it crashes. So sizes that are not known before are rounded up to one of eight
    per power of two, and each of these classes is a collective of its own.
    """
    fixed = vector.shape.num_elements()
    if fixed:
        return vector, fixed, None
    size = tf.size(vector)
    # The bits of a float64 that hold its exponent and the first three of its fraction.
    bits = tf.bitcast(tf.cast(tf.maximum(size, 1), tf.float64), tf.int64)
    rounded = tf.bitwise.right_shift(bits + (1 << 49) - 1, 49)
    room = tf.cast(tf.bitcast(tf.bitwise.left_shift(rounded, 49), tf.float64), tf.int32)
    size_class = tf.cast(rounded - (1023 << 3), tf.int32)
    return tf.pad(vector, [[0, room - size]]), size, size_class
