"""Description of how an optimizer's gradients are sent, for ``explain()`` and telemetry."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import index_in, path_of
from tfscale.bridge.protocols import Optimizer, Variable
from tfscale.compression.deciding import Change
from tfscale.compression.gradient import Gradient
from tfscale.compression.method import Method
from tfscale.compression.switching import Switching
from tfscale.exchange.buckets import Bucket
from tfscale.native.bucket import BucketId
from tfscale.native.cell import Cell

Variant = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One of the collectives that sum a bucket.

    Args:
        bucket: name of the collective in the engine, without the place where it was traced.
        bytes: size of an all-reduce that sends as many bytes.
        reduced: size on the wire if the collective is an all-reduce, which needs a schedule.
        half: name of the schedule and what its half does, if the collective is a half of an
            all-reduce.
        variant: numbers of the variants that run the collective, if its method is made of others:
            see ``Switching``.
    """

    bucket: BucketId
    bytes: int
    reduced: int | None = None
    half: tuple[str, str] | None = None
    variant: Variant = ()


@dataclasses.dataclass(frozen=True)
class Packing:
    """Description of how an optimizer's gradients are sent.

    Args:
        label: name of the optimizer here.
        buckets: buckets of the last trace.
        gradients: gradients, in the order that the buckets refer to.
        collectives: collectives of each bucket.
        reasons: reasons for the kind of sum, by bucket and variant.
        notes: numbers of the variants that sum a bucket, for methods that are made of others. All
            graphs of the optimizer share them, and the two that follow.
        shared: objects that the buckets of a method share: see ``Load.shared``.
        changes: changes of methods during the training, equal on all replicas.
    """

    label: str
    buckets: tuple[Bucket, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    collectives: dict[Bucket, list[Collective]] = dataclasses.field(default_factory=dict)
    reasons: dict[tuple[Bucket, Variant], str] = dataclasses.field(default_factory=dict)
    notes: dict[tuple[BucketId, Variant], Cell] = dataclasses.field(default_factory=dict)
    shared: dict[Any, Any] = dataclasses.field(default_factory=dict)
    changes: list[Change] = dataclasses.field(default_factory=list)

    def name(self, bucket: Bucket) -> BucketId:
        """Return the name of a bucket in the engine and its log, without the place of the trace."""
        return BucketId(bucket.name, self.label)

    def variant(self, bucket: Bucket) -> tuple[Method, Variant]:
        """Return the method that summed the bucket in the last step, and the variants' numbers."""
        method: Method = bucket.method
        way: Variant = ()
        while isinstance(method, Switching):
            cell = self.notes.get((self.name(bucket), way))
            number = 0 if cell is None else int(cell.numpy())
            method, way = method.variants[number], (*way, number)
        return method, way


def describe(variable: Variable) -> Gradient:
    """Return the description of a Keras or TensorFlow variable's gradient."""
    return Gradient(path_of(variable), tuple(variable.shape), tf.as_dtype(variable.dtype).name)


def place_of(optimizer: Optimizer, variable: Variable) -> str:
    """Return a variable's index in its optimizer; with Keras 2, which has none, its path."""
    index = index_in(optimizer, variable)
    return describe(variable).path if index is None else str(index)
