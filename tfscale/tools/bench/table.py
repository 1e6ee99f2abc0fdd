"""Results of all-reduces as a table: times, bandwidths, the bound, and comparisons."""

from __future__ import annotations

import dataclasses
import math
import mmap
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tfscale.collectives import wires
from tfscale.tools.bench.assignment import Contestant

if TYPE_CHECKING:
    from rich.table import Table


_LARGE = 1 << 20  # bytes; in smaller buffers, fresh pages cost less than the rest of a call


def bus_factor(processes: int) -> float:
    """Return how many times the buffer's bytes each rank must send at least: 2(P-1)/P.

    Each rank sends (P-1)/P of the buffer as contributions to sums that other ranks finish, and
    as much again as totals.
    """
    return 2 * (processes - 1) / processes


def bound_seconds(wire: str, size: int, processes: int, rate: float) -> float:
    """Return the least seconds of an all-reduce whose ranks each send ``rate`` bytes per second."""
    return bus_factor(processes) * wires.nbytes(wire, size) / rate


@dataclasses.dataclass
class AllReduceResult:
    """Row of the table: results of a contestant at one size and number of processes.

    Attributes:
        processor_ms: processor time of all ranks together in a call, on average.
        faults: page faults of a rank in a call, on average.
        switches: context switches of a rank in a call, on average.
        share_of_bound: the bound divided by the median time.
        error: the largest error divided by the largest number of the exact sum.
        sent_bytes: bytes that the busiest rank sends; None if unknown.
        times_tf: stock TensorFlow's median time divided by this contestant's.
        over_nothing_ms: this median time less that of a function that exchanges nothing.
    """

    numbers: int
    bytes: int
    processes: int
    contestant: str
    algorithm: str
    wire: str
    piece_bytes: int
    transport: str
    rounds: int
    calls_per_round: int
    median_ms: float
    min_ms: float
    processor_ms: float
    faults: float
    switches: float
    algbw_GBps: float
    busbw_GBps: float
    sent_bytes: int | None
    bound_ms: float
    share_of_bound: float
    error: float
    same_bits: bool
    times_tf: float | None = None
    over_nothing_ms: float | None = None


def make_record(
    contestant: Contestant,
    size: int,
    processes: int,
    rate: float,
    ranks: Sequence[dict[str, Any]],
) -> AllReduceResult:
    """Join the results of all ranks: a round takes as long as its slowest rank."""
    seconds = [max(each) for each in zip(*(rank["times"] for rank in ranks), strict=True)]
    median = statistics.median(seconds)
    exchanges_nothing = contestant.algorithm == "nothing"
    bound = 0.0 if exchanges_nothing else bound_seconds(contestant.wire, size, processes, rate)
    return AllReduceResult(
        numbers=size,
        bytes=4 * size,
        processes=processes,
        contestant=contestant.label,
        algorithm=contestant.algorithm,
        wire=contestant.wire,
        piece_bytes=contestant.piece_bytes,
        transport="" if contestant.stock else contestant.transport,
        rounds=len(seconds),
        calls_per_round=ranks[0]["calls"],
        median_ms=1e3 * median,
        min_ms=1e3 * min(seconds),
        processor_ms=1e3 * sum(rank["processor"] for rank in ranks),
        faults=statistics.mean(rank["faults"] for rank in ranks),
        switches=statistics.mean(rank["switches"] for rank in ranks),
        algbw_GBps=4e-9 * size / median,
        busbw_GBps=4e-9 * size / median * bus_factor(processes),
        sent_bytes=_sent(contestant, size, processes),
        bound_ms=1e3 * bound,
        share_of_bound=bound / median,
        error=0.0 if exchanges_nothing else ranks[0]["error"],
        same_bits=exchanges_nothing or len({rank["digest"] for rank in ranks}) == 1,
    )


def _sent(contestant: Contestant, size: int, processes: int) -> int | None:
    if contestant.stock:
        return None  # other libraries do not report it
    from tfscale import collectives

    schedule = collectives.resolve(contestant.algorithm, processes)
    return round(schedule.verify().sent * wires.nbytes(contestant.wire, size))


def compare_with_tf(records: Sequence[AllReduceResult]) -> None:
    """Set ``times_tf`` of each record whose size was also measured with stock TensorFlow."""
    stock = _medians(records, "tf")
    for record in records:
        median = stock.get((record.numbers, record.processes))
        record.times_tf = None if median is None else median / record.median_ms


def compare_with_nothing(records: Sequence[AllReduceResult]) -> None:
    """Fill ``over_nothing_ms`` wherever a function that exchanges nothing was measured too."""
    floors = _medians(records, "nothing")
    for record in records:
        floor = floors.get((record.numbers, record.processes))
        record.over_nothing_ms = None if floor is None else record.median_ms - floor


def _medians(records: Sequence[AllReduceResult], algorithm: str) -> dict[tuple[int, int], float]:
    """Return one contestant's medians, by size and number of processes."""
    return {(r.numbers, r.processes): r.median_ms for r in records if r.algorithm == algorithm}


def pays_for_pages(record: AllReduceResult) -> bool:
    """Return whether a call's page faults are more than half of the pages of its buffer."""
    return record.bytes >= _LARGE and record.faults > record.bytes / mmap.PAGESIZE / 2


def new_table(title: str, words: Iterable[str], numbers: Iterable[str], **how: Any) -> Table:
    """Return a table without rows: columns of ``words`` at the left, then those of ``numbers``."""
    from rich import box
    from rich.table import Table

    usual = {"box": box.SIMPLE_HEAD, "title_justify": "left", "title_style": "bold"}
    table = Table(title=title, **{**usual, **how})
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table with these rows; all columns but the first one hold numbers."""
    table = new_table(title, columns[:1], columns[1:], pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def make_table(records: Sequence[AllReduceResult], title: str = "") -> Table:
    """Return the table of one number of processes: grouped by size, the fastest row in bold."""
    from rich import box
    from rich.table import Table

    against = any(record.times_tf is not None for record in records)
    floor = any(record.over_nothing_ms is not None for record in records)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("numbers", justify="right", no_wrap=True)
    table.add_column("contestant", no_wrap=True)
    # The floor of a call is made of hand-overs between threads, and not of bandwidth.
    pace = ("context\nswitches", "over\nnothing") if floor else ("busbw\nGB/s",)
    before = ("ms", "min ms", "cpu ms", "page\nfaults")
    for name in (*before, *pace, "sent\nMB/rank", "of\nbound", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    if against:
        table.add_column("times\ntf", justify="right", no_wrap=True)
    for size in dict.fromkeys(record.numbers for record in records):
        group = [record for record in records if record.numbers == size]
        exchanges = (r.median_ms for r in group if r.algorithm != "nothing")
        best = min(exchanges, default=None)
        for record in group:
            first = f"{size:,}" if record is group[0] else ""
            style = "bold" if record.median_ms == best else ""
            style = style if record.same_bits else "red"
            table.add_row(first, *_cells(record, against, floor), style=style)
        table.add_section()
    return table


def _cells(record: AllReduceResult, against: bool, floor: bool) -> list[str]:
    over = "" if record.over_nothing_ms is None else f"{record.over_nothing_ms:+.2f}"
    sent = "?" if record.sent_bytes is None else f"{record.sent_bytes / 1e6:.3g}"
    cells = [
        record.contestant,
        short(record.median_ms),
        short(record.min_ms),
        short(record.processor_ms),
        f"{record.faults:,.0f}",
        *([short(record.switches), over] if floor else [f"{record.busbw_GBps:.3f}"]),
        sent,
        f"{record.share_of_bound:.0%}",
        f"{record.error:.1e}" + ("" if record.same_bits else " RANKS DIFFER"),
    ]
    if against:
        cells.append("" if record.times_tf is None else f"{record.times_tf:.2f}x")
    return cells


def short(number: float) -> str:
    """Return the number with three significant digits and without an exponent."""
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}" if number > 0 else "0"
