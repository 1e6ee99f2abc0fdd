"""All-reduces in the background, while TensorFlow makes other steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfscale.collectives.registry import checked_algorithm
from tfscale.native import library
from tfscale.native.bucket import Name
from tfscale.native.collective import (
    Algorithm,
    as_tensor,
    checked_communicator,
    checked_residual,
    common_arguments,
    resolved,
)
from tfscale.native.group import Communicator
from tfscale.support import arguments


class Taken(NamedTuple):
    """Result of an all-reduce in the background.

    Args:
        total: sum over all ranks.
        lost: new residual; None if the all-reduce had no residual.
        waited: seconds that ``take`` has waited for the sum.
        took: seconds that the all-reduce took since ``begin``.
    """

    total: tf.Tensor
    lost: tf.Tensor | None
    waited: tf.Tensor
    took: tf.Tensor


class InFlight(NamedTuple):
    """Numbers of all-reduces in the background whose sums nobody has taken.

    Args:
        held: number of all of them.
        there: how many of them, from the oldest on, are over.
    """

    held: tf.Tensor
    there: tf.Tensor


class Flight:
    """Runner of all-reduces in the background, one at a time.

    Every rank must begin the same all-reduces in the same order; each rank may take the sums when
    it likes, the oldest first. A flight holds the sums of the last ``most`` all-reduces. ``begin``
    returns at once while there is room. Otherwise it waits for the end of the oldest all-reduce,
    and drops the sum that nobody has taken. ``take`` raises the error of a failed all-reduce, such
    as a lost rank.

    Args:
        communicator: communicator of this rank.
        most: number of sums that the flight holds.

    Example:
        >>> group = tfscale.ops.Group.local(["CPU:0", "CPU:1"])
        >>> flights = [tfscale.ops.Flight(own) for own in group.communicators]
        >>> @group.function
        ... def begin(communicator, x):
        ...     return flights[communicator.rank].begin(x, name="changes")
        >>> @group.function
        ... def take(communicator):
        ...     return flights[communicator.rank].take([1]).total
        >>> _ = begin([tf.constant([1.0]), tf.constant([2.0])])
        >>> print(take()[0].numpy())  # after some other steps
        [3.]
    """

    def __init__(self, communicator: Communicator, most: int = 1) -> None:
        self._communicator = checked_communicator(communicator)
        arguments.whole(most, "most", 1, what="a number of sums")
        with tf.init_scope(), tf.device(communicator.device):
            self._handle = library.load().tfscale_flight(most=most)

    def counts(self) -> InFlight:
        """Return how many sums nobody has taken, and how many of these are there already."""
        return InFlight(*library.load().tfscale_in_flight(flight=self._handle))

    def drop(self) -> None:
        """Drop all sums that nobody has taken, and their errors; what is under way goes on."""
        library.load().tfscale_drop(flight=self._handle)

    def begin(
        self,
        x: tf.Tensor,
        *,
        schedule: Algorithm = "ring",
        wire: str = "fp32",
        residual: tf.Tensor | None = None,
        stochastic: bool | None = None,
        seed: Any = 0,
        piece_bytes: int = 0,
        name: Name | None = None,
    ) -> None:
        """Begin to sum ``x``, a float32 tensor, over all ranks.

        ``all_reduce`` describes the arguments.
        """
        communicator = self._communicator
        x = as_tensor(x, "x")
        if x.dtype != tf.float32:
            raise arguments.wrong(x, "x", "a tensor of float32", "Cast it first")
        made = resolved(checked_algorithm(schedule, "schedule"), communicator.ranks)
        common = common_arguments(
            communicator, made, "flight", wire, stochastic, seed, piece_bytes, name, residual
        )
        given = checked_residual(residual, x)
        library.load().tfscale_begin(x=x, residual=given, flight=self._handle, **common)

    def take(self, shape: Any, residual: bool = False) -> Taken:
        """Wait for the sum and return it.

        Args:
            shape: shape of the tensor that ``begin`` was called with.
            residual: whether ``begin`` was called with a residual.
        """
        residual = arguments.flag(residual, "residual")
        try:
            shape = tf.TensorShape(shape)
        except (TypeError, ValueError):
            raise arguments.wrong(shape, "shape", "a tensor's shape, such as [2, 3]") from None
        y, lost, waited, took = library.load().tfscale_take(
            flight=self._handle, lost_types=[tf.float32] * residual, shape=shape
        )
        return Taken(y, lost[0] if residual else None, waited, took)
