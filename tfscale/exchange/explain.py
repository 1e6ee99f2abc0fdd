"""Table that ``strategy.explain()`` returns: it shows how gradients are sent."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfscale.collectives import Schedule
from tfscale.collectives.choose import Chooser
from tfscale.collectives.wires import LOSSLESS, nbytes
from tfscale.compression.gradient import Gradient
from tfscale.compression.method import RESIDUAL, Method, Wire
from tfscale.exchange.buckets import Bucket
from tfscale.exchange.collective_schedules import price
from tfscale.exchange.packing import Collective, Packing
from tfscale.exchange.reducer import Reducer
from tfscale.exchange.team import Team
from tfscale.native.bucket import BucketId
from tfscale.support.text import WIDTH, entries

if TYPE_CHECKING:
    from tfscale.native.log import Total


@dataclasses.dataclass(frozen=True)
class Row:
    """One bucket of dense gradients, or one sparse gradient that is sent as rows.

    The number of rows differs from step to step, so the ``elements`` and bytes of rows are 0.

    Args:
        bucket: name of the bucket in errors and logs, without the place where it was traced.
        variables: paths of the variables whose gradients the bucket holds. A suffix says if it
            holds something else: ``"/curvature"`` (AdaHessian's measurements), ``"/move"``
            (gradients by which a step moves weights) or ``"/weights"``.
        elements: number of elements in the bucket.
        wire: the format in which the gradients, or what the method makes of them, are sent.
        feedback: whether what is not sent is added to the gradients of the next step.
        bytes: size of the bucket on the wire. If the method sends something else: size of an
            all-reduce that sends as many bytes.
        lossless: size of the bucket on the wire ``"fp32"``.
        algorithm: name of the schedule.
        why: the reason for the schedule, and for the method's decisions if it has a choice.
        predicted: seconds by the cost model; 0 if the model was not used.
        gain: seconds that the wire saves against ``"fp32"``, by the cost model; 0 if the model does
            not know both wires.
        calls: number of times that the bucket has been sent.
        sent: bytes that this process's first replica has sent, on average per call.
        measured: seconds that a call took, on average.
        method: name of the method, such as ``"int8"`` or ``"PowerSGD(rank=4)"``.
        collectives: names of the collectives in errors and logs, without the place where they were
            traced.
        switching: description of the switching, if the method is one of several.
    """

    bucket: BucketId
    variables: tuple[str, ...]
    elements: int
    wire: str
    feedback: bool
    bytes: int
    lossless: int
    algorithm: str
    why: str
    predicted: float
    gain: float
    calls: int
    sent: float
    measured: float
    method: str = ""
    collectives: tuple[BucketId, ...] = ()
    switching: str = ""

    @property
    def saved(self) -> float:
        """The bucket's size on the wire ``"fp32"``, divided by its size on this wire."""
        return self.lossless / self.bytes if self.bytes else 1.0

    @property
    def words(self) -> str:
        """The bucket's name, its schedule, and the reason for that schedule."""
        switching = self.switching and f"; {self.switching}"
        return f"{self.bucket}, by {self.algorithm} ({self.why}){switching}"


def rows(reducer: Reducer) -> list[Row]:
    """Return all buckets of all traced optimizers, in the order in which they are sent."""
    reducer.trials.tell_chooser()
    communicators = reducer.team.communicators
    totals = communicators[0].totals() if communicators else {}
    every = list(reducer.packings.values())
    return [_row(reducer, one, bucket, totals) for one in every for bucket in one.buckets]


def _row(reducer: Reducer, packing: Packing, bucket: Bucket, totals: dict[BucketId, Total]) -> Row:
    members = [packing.gradients[i] for i in bucket.members]
    method, way = packing.variant(bucket)
    every = packing.collectives.get(bucket, [])
    collectives = [one for one in every if one.variant == way]
    size = sum(one.bytes for one in collectives)
    lossless = 0 if bucket.rows else sum(gradient.bytes for gradient in members)
    choices = [
        reducer.team.schedules.choose(one.reduced)
        for one in sorted(collectives, key=lambda one: -(one.reduced or 0))
        if one.reduced is not None
    ]
    joined = ("rows", "rows of a table") if bucket.rows else ("ring", "rows of all replicas joined")
    joined = next((one.half for one in collectives if one.half), joined)
    algorithm, why = (choices[0].algorithm, choices[0].why) if choices else joined
    reason = packing.reasons.get((bucket, way))
    return Row(
        bucket=packing.name(bucket),
        variables=tuple(gradient.path + reducer.suffix for gradient in members),
        elements=0 if bucket.rows else sum(gradient.elements for gradient in members),
        wire=method.wires[0],
        feedback=any(RESIDUAL in method.state(gradient) for gradient in members),
        bytes=size,
        lossless=lossless,
        algorithm=algorithm,
        why=f"{why}; {reason}" if reason else why,
        predicted=sum(choice.seconds for choice in choices),
        gain=0.0 if bucket.rows else _gain(reducer, bucket.method, size, lossless),
        method=str(method),
        switching=_switching(packing, bucket, method),
        collectives=tuple(one.bucket for one in collectives),
        **_measured(totals, collectives),
    )


def row_of_mixtures(
    team: Team,
    bucket: BucketId,
    weights: Sequence[Gradient],
    rounds: Sequence[Schedule],
    wire: str,
) -> Row:
    """Return the row for mixtures of these weights, which take turns, compared with a sum."""
    lossless, elements = (sum(one.bytes for one in weights), sum(one.elements for one in weights))
    size = lossless if wire == LOSSLESS else nbytes(wire, elements)
    schedules = team.schedules
    choice = schedules.choose(size)
    cost, summing = rounds[0].cost, schedules.schedule(choice.algorithm).cost
    why, seconds = "", 0.0
    if cost is not None and summing is not None:
        sent, summed = round(cost.sent * size), round(summing.sent * size)
        why = f"a replica sends {sent:,} bytes; to sum them by {choice.algorithm}, {summed:,}"
        if isinstance(schedules, Chooser):
            seconds = cost.time(size, schedules.machine, schedules.gamma)
            why += f" in {_ms(choice.seconds)} ms by the model"
    more = f" and {len(rounds) - 1} more in turn" if len(rounds) > 1 else ""
    by = {"algorithm": f"{rounds[0].name}{more}", "why": why, "predicted": seconds}
    return _row_of_weights(team, bucket, weights, wire, size, lossless=lossless, **by)


def row_of_shards(team: Team, bucket: BucketId, weights: Sequence[Gradient]) -> Row:
    """Return the row for an all-gather of shards, or for a reduce-scatter of their sum."""
    size = nbytes(LOSSLESS, sum(one.elements for one in weights))
    cost = price(team.schedules, team.size, [], [size // team.size])
    by = {
        "algorithm": "ring",
        "why": "shards of all replicas",
        "predicted": cost.amount if cost.unit == "seconds" else 0.0,
    }
    half = size // 2  # an all-reduce of this size sends as many bytes
    return _row_of_weights(team, bucket, weights, LOSSLESS, half, lossless=half, **by)


def _row_of_weights(
    team: Team,
    bucket: BucketId,
    weights: Sequence[Gradient],
    wire: str,
    size: int,
    **by: Any,
) -> Row:
    return Row(
        bucket=bucket,
        variables=tuple(weight.path for weight in weights),
        elements=sum(weight.elements for weight in weights),
        wire=wire,
        feedback=False,
        bytes=size,
        gain=0.0,
        method=str(Wire(wire, False)),
        collectives=(bucket,),
        **by,
        **_measured(team.communicators[0].totals(), [Collective(bucket, size)]),
    )


def _switching(packing: Packing, bucket: Bucket, method: Method) -> str:
    if method is bucket.method:
        return ""
    name = str(packing.name(bucket))
    made = [change for change in packing.changes if change.bucket == name]
    said = [f"{made[-1].after} from step {made[-1].step} on, as {made[-1].why}"] if made else []
    return ": ".join([str(bucket.method), *said])


def _gain(reducer: Reducer, method: Method, size: int, lossless: int) -> float:
    chooser = reducer.team.schedules
    if not isinstance(chooser, Chooser) or chooser.lossless is None:
        return 0.0
    if not isinstance(method, Wire) or method != reducer.policy.method:  # only that was measured
        return 0.0
    return chooser.lossless.predicted(lossless) - chooser.predicted(size)


def _measured(totals: dict[BucketId, Total], collectives: Sequence[Collective]) -> dict[str, Any]:
    """Return how often any graph sent the collectives, and the average bytes and seconds."""
    names = {one.bucket for one in collectives}
    ran = [total for key, total in totals.items() if key.untraced in names]
    calls = sum(total.calls for total in ran) // max(1, len(names))
    return {
        "calls": calls,
        "sent": sum(total.sent for total in ran) / max(1, calls),
        "measured": sum(total.seconds for total in ran) / max(1, calls),
    }


class Explanation(list[Row]):
    """Rows for programs, which ``print`` shows as a table for people.

    Args:
        rows: one row for each bucket.
        replicas: number of replicas.
        ways: transports from this process's first replica to the others, in words.
        rounds: note for rules that synchronize once in many steps: when they do, and at what cost.
        title: title of the table.
        shares: note on the parts of a batch that replicas take, unless all are equal.
        memory: note on whether TensorFlow keeps the memory of tensors, on CPUs.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        replicas: int,
        ways: str = "",
        rounds: str = "",
        title: str = "Gradients, in the order in which they are sent",
        memory: str = "",
        shares: str = "",
    ) -> None:
        super().__init__(rows)
        self._replicas = replicas
        self.ways = ways
        self.rounds = rounds
        self.memory = memory
        self.shares = shares
        self._title = title

    def __repr__(self) -> str:
        if self._replicas == 1:
            return "Nothing is sent: there is one replica."
        if not self:
            return "Nothing to show yet: explain() describes the steps that have been traced."
        table = entries(_COLUMNS, [(row.words, _cells(row)) for row in self])
        ways = self.ways and f"They go {self.ways}"
        notes = [self.rounds, self.shares, ways, *self._without_gain(), self.memory]
        said = "".join("\n" + textwrap.fill(note, WIDTH) for note in notes if note)
        return f"{self._title}\n{table}{said}"

    def _without_gain(self) -> Iterator[str]:
        for wire in dict.fromkeys(row.wire for row in self):
            lost = -sum(row.gain for row in self if row.wire == wire)
            if lost > 0:
                yield (
                    f"The wire {wire!r} does not pay here: by the model, sums take "
                    f"{_ms(lost)} ms longer than as {LOSSLESS!r}"
                )


_COLUMNS = ("numbers", "bytes", "method", "ms by model", "ms taken")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.elements:,}" if row.elements else "-",
        f"{row.bytes:,}" if row.bytes else "-",
        row.method,
        _ms(row.predicted),
        _ms(row.measured),
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds else "-"
