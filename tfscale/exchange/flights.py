"""Sums that run in the background, while replicas go on with their steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.protocols import Optimizer, Variable
from tfscale.collectives.wires import FORMATS
from tfscale.compression.method import RESIDUAL, Wire, joined, separated
from tfscale.exchange.buckets import Bucket, pack
from tfscale.exchange.reducer import (
    Collective,
    Packing,
    Reducer,
    dense_bucket,
    describe,
    place_of,
)
from tfscale.exchange.state import ExchangeState
from tfscale.exchange.team import wire_bytes
from tfscale.native import Flight


class Flights:
    """Background sums of one model.

    Args:
        reducer: reducer whose replicas and policy the sums use.
        label: label of the sums in logs.
    """

    def __init__(self, reducer: Reducer, label: str) -> None:
        self._reducer, self._label = reducer, label
        self._team = reducer.team
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
        state: ExchangeState,
    ) -> None:
        """Begin to sum values over all replicas; each replica must call this method.

        Args:
            what: word for the values in the names of buckets.
            values: one value for each variable.
            variables: variables whose residuals hold the rounding errors.
            optimizer: optimizer of the variables.
            state: state that holds the residuals.
        """

        label = self._noted(what, variables, optimizer)

        def begun(replica: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            for bucket, method in self._buckets(what, variables):
                flat = joined([tf.cast(tensors[i], tf.float32) for i in bucket.members])
                lost = self._lost(replica, bucket, method, variables, optimizer, state)
                random = FORMATS[method.name].rounds_at_random(with_residual=bool(lost))
                size = wire_bytes(method.name, tf.float32, flat.shape.num_elements())
                schedules = self._team.schedules
                name = dense_bucket(label, bucket)
                self._flight(replica, bucket).begin(
                    flat,
                    schedule=schedules.schedule(schedules.choose(size).algorithm),
                    wire=method.name,
                    residual=joined([one.read_value() for one in lost]) if lost else None,
                    seed=state.next_seed(replica) if random else 0,
                    name=self._team.communicators[replica].new_bucket(name),
                )
            return []

        self._team.together(begun, list(values))

    def take(
        self, what: str, variables: Sequence[Variable], optimizer: Optimizer, state: ExchangeState
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Return the sums that ``begin`` has begun for the same part, and two times in seconds.

        The first time is how long this call waited, the second how long the sums took. Both are
        the largest of all buckets.
        """

        def taken(replica: int, _: list[Any]) -> list[tf.Tensor]:
            sums: list[Any] = [None] * len(variables)
            times = []
            for bucket, method in self._buckets(what, variables):
                like = [tf.TensorShape(variables[i].shape) for i in bucket.members]
                size = sum(math.prod(shape.as_list()) for shape in like)
                lost = self._lost(replica, bucket, method, variables, optimizer, state)
                found = self._flight(replica, bucket).take([size], residual=bool(lost))
                if lost:
                    for variable, part in zip(lost, separated(found.lost, lost), strict=True):
                        variable.assign(part)
                parts = separated(found.total, [variables[i] for i in bucket.members])
                for i, part in zip(bucket.members, parts, strict=True):
                    sums[i] = part
                times.append([found.waited, found.took])
            waited, took = tf.unstack(tf.reduce_max(times, 0))
            return [*sums, waited, took]

        *sums, waited, took = self._team.together(taken, [])
        return sums, waited, took

    def _buckets(self, what: str, variables: Sequence[Variable]) -> Iterator[tuple[Bucket, Wire]]:
        """Yield buckets and their methods, one bucket for all gradients of a method and a type.

        Smaller buckets would not help: no step waits for the first bucket.
        """
        described = [describe(v) for v in variables]
        whole = sum(one.bytes for one in described)
        for bucket in pack(described, self._reducer.policy, whole, whole, what):
            method = bucket.method
            if not isinstance(method, Wire):
                raise ValueError(
                    f"{method} needs more than one exchange, of which the second begins when the "
                    "first is over, so it cannot travel behind steps. Use a wire, such as "
                    'wire="int8"; or leave out fragments and delay'
                )
            yield bucket, method

    def _noted(self, what: str, variables: Sequence[Variable], optimizer: Optimizer) -> str:
        """Describe a part for ``explain``, once, and return the label of its sums in logs."""
        label = self._reducer.label_of(optimizer, self._label)
        if what in self._known:
            return label
        self._known.add(what)
        before = self._reducer.packings[optimizer]
        first, buckets, collectives = len(before.gradients), [], dict(before.collectives)
        for bucket, method in self._buckets(what, variables):
            size = sum(describe(variables[i]).elements for i in bucket.members)
            bytes_ = wire_bytes(method.name, tf.float32, size)
            moved = dataclasses.replace(bucket, members=tuple(first + i for i in bucket.members))
            name = dense_bucket(label, bucket)
            collectives[moved] = [Collective(name, bytes_, bytes_)]
            self._reducer.behind_steps.add(name)
            buckets.append(moved)
        self._reducer.packings[optimizer] = Packing(
            label,
            (*before.buckets, *buckets),
            (*before.gradients, *map(describe, variables)),
            (),
            collectives,
        )
        return label

    def _flight(self, replica: int, bucket: Bucket) -> Flight:
        key = (replica, bucket.name)
        if key not in self._flights:
            self._flights[key] = Flight(self._team.communicators[replica])
        return self._flights[key]

    def _lost(
        self,
        replica: int,
        bucket: Bucket,
        method: Wire,
        variables: Sequence[Variable],
        optimizer: Optimizer,
        state: ExchangeState,
    ) -> list[tf.Variable]:
        """Return the variables that hold the residuals; none if the method has no feedback."""
        if not method.feedback:
            return []
        name = self._reducer.keeps_as + RESIDUAL
        places = [place_of(optimizer, variables[i]) for i in bucket.members]
        return [state.kept(name, place, replica) for place in places]
