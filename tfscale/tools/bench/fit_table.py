"""Results of ``tfscale bench fit`` as a table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfscale.tools.bench.fit_contestants import FitContestant
from tfscale.tools.bench.table import short

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass
class FitResult:
    """Row of the table.

    Attributes:
        times: speed compared with the first contestant of the group: the median of the ratios by
            round, since a change of the machine's speed affects all contestants of a round alike.
    """

    part: str
    contestant: str
    way: str
    processes: int
    devices: int
    wire: str
    parameters: int
    rounds: int
    steps_per_turn: int
    median_ms: float
    min_ms: float
    steps_per_second: float
    times: float
    all_ms: list[float]
    faults: float = 0.0  # page faults of a process in a step of the last turn
    peak_mb: float = 0.0  # most memory that a process has held, in MB
    sent_per_step: float | None = None  # bytes; of the replica that sends most
    hidden: float | None = None  # share of the background exchange; of the replica that waits most


def conclude(
    group: Sequence[FitContestant],
    parameters: Sequence[int],
    steps: Sequence[int],
    times: Sequence[Sequence[float]],
) -> list[FitResult]:
    """Return the records of contestants; ``times`` holds seconds per step by round."""
    return [
        FitResult(
            part=contestant.part,
            contestant=contestant.name,
            way=contestant.way,
            processes=contestant.processes,
            devices=contestant.devices,
            wire=contestant.wire,
            parameters=parameters[i],
            rounds=len(mine),
            steps_per_turn=steps[i],
            median_ms=1e3 * statistics.median(mine),
            min_ms=1e3 * min(mine),
            steps_per_second=1 / statistics.median(mine),
            times=statistics.median(first / own for first, own in zip(times[0], mine, strict=True)),
            all_ms=[1e3 * seconds for seconds in mine],
        )
        for i, (contestant, mine) in enumerate(zip(group, times, strict=True))
    ]


def hidden_share(records: Sequence[FitResult]) -> float | None:
    """Return which share of the exchange takes no time of its own, as a median over rounds.

    The share is 1 - (step with the exchange - step without it) / (exchange alone).
    """
    by_way = {r.way: r.all_ms for r in records if r.part == "overlap"}
    if not by_way:
        return None
    rounds = zip(by_way["scale"], by_way["apart"], by_way["sums"], strict=True)
    return statistics.median(1 - (whole - without) / alone for whole, without, alone in rounds)


def exposed(records: Sequence[FitResult]) -> list[tuple[str, float, float]]:
    """Return for each method its name, the ms that it adds to a step, and an improvement.

    The improvement says how many times less the method adds than the first method does. Numbers
    are medians over rounds of the part ``"methods"``, whose first contestant exchanges nothing.
    """
    found = [record for record in records if record.part == "methods"]
    if not found:
        return []
    without, *others = (record.all_ms for record in found)
    added = [[own - least for own, least in zip(each, without, strict=True)] for each in others]
    return [
        (
            record.contestant,
            statistics.median(mine),
            statistics.median(one / max(own, 1e-3) for one, own in zip(added[0], mine)),
        )
        for record, mine in zip(found[1:], added, strict=True)
    ]


def sent_less(records: Sequence[FitResult]) -> list[tuple[str, float, float]]:
    """Return for each rule its name, its bytes per step, and how many times less than the first."""
    found = [(r.contestant, r.sent_per_step) for r in records if r.sent_per_step is not None]
    return [(name, sent, found[0][1] / max(sent, 1.0)) for name, sent in found]


def behind_steps(records: Sequence[FitResult]) -> list[tuple[str, float]]:
    """Return which share of its exchange's time each rule has not waited for, in the last turn."""
    return [(r.contestant, r.hidden) for r in records if r.hidden is not None]


def make_table(records: Sequence[FitResult], title: str) -> Table:
    """Return the table of a part, grouped by the number of devices."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("devices", justify="right", no_wrap=True)
    table.add_column("contestant", no_wrap=True)
    for name in ("parameters", "ms", "min ms", "steps/s", "page\nfaults", "peak\nMB", "times"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        table.add_row(
            f"{record.processes}x{record.devices}",
            record.contestant,
            f"{record.parameters:,}",
            short(record.median_ms),
            short(record.min_ms),
            short(record.steps_per_second),
            f"{record.faults:,.0f}",
            f"{record.peak_mb:,.0f}",
            f"{record.times:.3f}x",
        )
    return table
