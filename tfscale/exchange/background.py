"""Sums that run in the background, while replicas go on with their steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.protocols import Optimizer, Variable
from tfscale.compression.method import refuse_several_exchanges
from tfscale.exchange.bucket_sum import BucketSum, Summands
from tfscale.exchange.buckets import Bucket, pack
from tfscale.exchange.packing import Collective
from tfscale.exchange.reducer import Reducer
from tfscale.exchange.slots import Slots
from tfscale.exchange.team import wire_bytes
from tfscale.native import Flight


class BackgroundSums:
    """Background sums of one model.

    Args:
        reducer: reducer whose replicas and policy the sums use.
        label: label of the sums in logs.
        most: number of sums of a part that may be on their way at a time.
    """

    def __init__(self, reducer: Reducer, label: str, most: int = 1) -> None:
        self._reducer, self._label, self._most = reducer, label, most
        self._flights: dict[tuple[int, str], Flight] = {}
        self._known: set[str] = set()

    @property
    def parts(self) -> int:
        """Number of parts that are begun one after the other, each with some of the weights."""
        return len(self._known)

    def begin(
        self,
        what: str,
        values: Sequence[tf.Tensor],
        variables: Sequence[Variable],
        optimizer: Optimizer,
        state: Slots,
    ) -> None:
        """Begin to sum values over all replicas; each replica must call this method.

        Args:
            what: word for the values in the names of buckets.
            values: one value for each variable.
            variables: variables whose residuals hold the rounding errors.
            optimizer: optimizer of the variables.
            state: state that holds the residuals.
        """
        summands = self._reducer.summands(variables, optimizer, state, self._label)
        buckets = self._buckets(what, summands)
        if what not in self._known:
            self._known.add(what)
            self._describe(summands, buckets)

        def begun(replica: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            for bucket in buckets:
                flight = self._flight(replica, bucket)
                own = [tensors[i] for i in bucket.members]
                one = BucketSum(summands, replica, bucket)
                one.begin(flight, own, moves_residual=self._most > 1)
            return []

        self._reducer.team.together(begun, list(values))

    def take(
        self, what: str, variables: Sequence[Variable], optimizer: Optimizer, state: Slots
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Return the oldest sums that ``begin`` has begun for a part, and two times in seconds.

        The first time is how long this call waited, the second how long the sums took. Both are
        the largest of all buckets.
        """
        summands = self._reducer.summands(variables, optimizer, state, self._label)

        def taken(replica: int, _: list[Any]) -> list[tf.Tensor]:
            sums: dict[int, tf.Tensor] = {}
            times = []
            for bucket in self._buckets(what, summands):
                flight = self._flight(replica, bucket)
                one = BucketSum(summands, replica, bucket)
                totals, found = one.take(flight, adds_residual=self._most > 1)
                sums.update(zip(bucket.members, totals, strict=True))
                times.append([found.waited, found.took])
            return [*(sums[i] for i in range(len(sums))), *tf.unstack(tf.reduce_max(times, 0))]

        *sums, waited, took = self._reducer.team.together(taken, [])
        return sums, waited, took

    def _buckets(self, what: str, summands: Summands) -> tuple[Bucket, ...]:
        """Return one bucket for all gradients of a method and a type.

        Smaller buckets would not help: no step waits for the first bucket.
        """
        whole = sum(one.bytes for one in summands.gradients)
        buckets = pack(summands.gradients, self._reducer.policy, whole, whole, what)
        for bucket in buckets:
            refuse_several_exchanges([bucket.method])
        return buckets

    def _describe(self, summands: Summands, buckets: Sequence[Bucket]) -> None:
        """Add a part to the description for ``explain``."""
        before = self._reducer.packings[summands.optimizer]
        first, collectives = len(before.gradients), {}
        for bucket in buckets:
            size = sum(summands.gradients[i].elements for i in bucket.members)
            bytes_ = wire_bytes(bucket.method.wires[0], tf.float32, size)
            moved = dataclasses.replace(bucket, members=tuple(first + i for i in bucket.members))
            name = before.name(bucket)
            collectives[moved] = [Collective(name, bytes_, bytes_)]
            self._reducer.behind_steps.add(name)
        self._reducer.packings[summands.optimizer] = dataclasses.replace(
            before,
            buckets=(*before.buckets, *collectives),
            gradients=(*before.gradients, *summands.gradients),
            collectives={**before.collectives, **collectives},
        )

    def _flight(self, replica: int, bucket: Bucket) -> Flight:
        key = (replica, bucket.name)
        if key not in self._flights:
            self._flights[key] = Flight(self._reducer.team.communicators[replica], self._most)
        return self._flights[key]

    def drop(self, replica: int) -> None:
        """Drop the sums of all parts that one replica has begun, with their rounding errors."""
        for (owner, _), flight in self._flights.items():
            if owner == replica:
                flight.drop()
