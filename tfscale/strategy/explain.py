"""What travels how: what ``strategy.explain()`` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfscale.strategy.exchange import wire_bytes
from tfscale.strategy.gradients import Reducer, bucket_name, sparse_name
from tfscale.text import entries
from tfscale.wires import LOSSLESS

if TYPE_CHECKING:
    from tfscale.ops.log import Total


@dataclasses.dataclass(frozen=True)
class Row:
    """One bucket of gradients; or one gradient of which some rows travel, losslessly.

    How many rows these are differs from step to step: ``elements`` and bytes are 0.

    Args:
        bucket: its name in errors and logs.
        variables: whose gradients it holds.
        elements: how many numbers.
        wire: in which format they travel.
        feedback: whether what they lose comes back later.
        bytes: how many they are on the wire.
        lossless: how many they would be on the wire ``"fp32"``.
        algorithm: by which schedule.
        why: it is that one.
        predicted: seconds, as the cost model has it; 0 where nobody asked it.
        calls: how often it has travelled.
        sent: bytes that this process's first replica has sent, on average.
        measured: seconds that it took, on average.
    """

    bucket: str
    variables: tuple[str, ...]
    elements: int
    wire: str
    feedback: bool
    bytes: int
    lossless: int
    algorithm: str
    why: str
    predicted: float
    calls: int
    sent: float
    measured: float

    @property
    def saved(self) -> float:
        """How many bytes of the wire ``"fp32"`` one on this wire stands for."""
        return self.lossless / self.bytes if self.bytes else 1.0

    @property
    def words(self) -> str:
        """Which bucket travels by which schedule, and why."""
        return f"{self.bucket}, by {self.algorithm} ({self.why})"


def rows(reducer: Reducer) -> list[Row]:
    """All buckets of all optimizers that have been traced, in the order of their travel."""
    reducer.trials.tell_chooser()
    communicators = reducer.exchange.communicators
    totals = communicators[0].totals() if communicators else {}
    return list(_rows(reducer, totals))


def _rows(reducer: Reducer, totals: dict[str, Total]) -> Iterator[Row]:
    for plan in list(reducer.plans.values()):
        for bucket in plan.buckets:
            members = [plan.gradients[i] for i in bucket.members]
            elements = sum(gradient.elements for gradient in members)
            size = wire_bytes(bucket.wire, tf.as_dtype(bucket.dtype), elements)
            choice = reducer.exchange.schedules.choose(size)
            name = bucket_name(plan.label, bucket)
            yield Row(
                bucket=name,
                variables=tuple(gradient.path for gradient in members),
                elements=elements,
                wire=bucket.wire,
                feedback=bucket.wire in reducer.feedback,
                bytes=size,
                lossless=sum(gradient.bytes for gradient in members),
                algorithm=choice.algorithm,
                why=choice.why,
                predicted=choice.seconds,
                **_measured(totals, name),
            )
        for gradient in plan.sparse:
            name = sparse_name(plan.label, gradient)
            yield Row(
                bucket=name,
                variables=(gradient.path,),
                elements=0,
                wire=LOSSLESS,
                feedback=False,
                bytes=0,
                lossless=0,
                algorithm="rows",
                why="rows of a table",
                predicted=0.0,
                **_measured(totals, name),
            )


def _measured(totals: dict[str, Total], name: str) -> dict[str, Any]:
    """How often what is called so has travelled, and what it sent and took then."""
    ran = [total for key, total in totals.items() if ran_as(key, name)]
    calls = sum(total.calls for total in ran)
    return {
        "calls": calls,
        "sent": sum(total.sent for total in ran) / max(1, calls),
        "measured": sum(total.seconds for total in ran) / max(1, calls),
    }


def ran_as(key: str, name: str) -> bool:
    """Whether the log calls a bucket so.

    An eager bucket has the bare name; a graph's the graph's name before it, and a number.
    """
    return key == name or f"/{name}_" in key


class Explanation(list[Row]):
    """The rows, for programs; ``print`` makes a table of them, for people.

    Args:
        rows: what travels.
        replicas: between how many.
    """

    def __init__(self, rows: Iterable[Row], replicas: int) -> None:
        super().__init__(rows)
        self._replicas = replicas

    def __repr__(self) -> str:
        if self._replicas == 1:
            return "Nothing travels: there is one replica."
        if not self:
            return "Nothing to show yet: explain() describes the steps that have been traced."
        title = "Gradients, in the order in which they travel"
        return f"{title}\n{entries(_COLUMNS, [(row.words, _cells(row)) for row in self])}"

    __str__ = __repr__


_COLUMNS = ("numbers", "bytes", "wire", "ms by model", "ms taken")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.elements:,}" if row.elements else "-",
        f"{row.bytes:,}" if row.bytes else "-",
        row.wire + (" + feedback" if row.feedback else ""),
        _ms(row.predicted),
        _ms(row.measured),
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds else "-"
