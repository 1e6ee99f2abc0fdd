"""Numbers in the table."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from rich.console import Console

from tfscale.collectives import wires
from tfscale.tools.bench import measure
from tfscale.tools.bench.assignment import Contestant
from tfscale.tools.bench.table import (
    bound_seconds,
    compare_with_nothing,
    compare_with_tf,
    make_record,
    make_table,
    short,
)


def ranks(times: list[list[float]], digests: str) -> list[dict]:
    return [
        {
            "times": each,
            "processor": 0.1,
            "faults": 7.0,
            "switches": 4.0,
            "digest": digest,
            "calls": 2,
            "error": 0.5,
        }
        for each, digest in zip(times, digests, strict=True)
    ]


@pytest.mark.parametrize(
    "wire, size, expected",
    [
        ("fp32", 1000, 4000), ("bf16", 1000, 2000), ("fp16", 1000, 2016), ("int8", 1000, 1016),
        ("fp8", 256, 260), ("int4", 257, 129 + 8), ("ternary", 1, 1 + 4), ("sign", 512, 64 + 8),
    ],
)  # fmt: skip
def test_bytes_on_the_wire_are_those_of_the_codecs(wire: str, size: int, expected: int) -> None:
    assert wires.nbytes(wire, size) == expected


def test_the_bound_of_the_published_example() -> None:
    """10 million numbers, 4 ranks, 1 Gbit/s."""
    assert bound_seconds("fp32", 10**7, 4, 125e6) == pytest.approx(0.480)
    assert bound_seconds("bf16", 10**7, 4, 125e6) == pytest.approx(0.240)
    assert bound_seconds("int8", 10**7, 4, 125e6) == pytest.approx(0.122, rel=0.01)


def test_what_exchanges_nothing_is_the_floor_and_never_the_fastest() -> None:
    floor = make_record(Contestant("nothing"), 1000, 2, 100e6, ranks([[0.1], [0.1]], "ab"))
    ours = make_record(Contestant("ring"), 1000, 2, 100e6, ranks([[0.4], [0.3]], "aa"))
    compare_with_nothing([floor, ours])
    assert floor.same_bits and floor.error == 0 and floor.share_of_bound == 0
    assert ours.over_nothing_ms == pytest.approx(300) and floor.over_nothing_ms == 0
    assert ours.switches == 4
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=True).print(make_table([floor, ours]))
    bold = [line for line in out.getvalue().splitlines() if "\x1b[1m" in line and "+" in line]
    assert len(bold) == 1 and "ring fp32" in bold[0] and "+300.00" in bold[0]


def test_a_round_lasts_as_long_as_its_slowest_rank() -> None:
    times = [[0.1, 0.5, 0.3], [0.2, 0.1, 0.3]]
    record = make_record(Contestant("ring"), 10**6, 2, 100e6, ranks(times, "aa"))
    assert record.median_ms == pytest.approx(300)
    assert record.min_ms == pytest.approx(200)
    assert record.processor_ms == pytest.approx(100 * record.processes)
    assert record.algbw_GBps == pytest.approx(4e6 / 0.3 / 1e9)
    assert record.busbw_GBps == pytest.approx(record.algbw_GBps)  # 2(P-1)/P is 1
    assert record.bound_ms == pytest.approx(40)
    assert record.share_of_bound == pytest.approx(40 / 300)
    assert record.sent_bytes == 4 * 10**6
    assert record.same_bits


def test_sent_bytes_are_the_busiest_ranks() -> None:
    central = make_record(Contestant("central"), 100, 4, 1, ranks([[1.0]] * 4, "aaaa"))
    assert central.sent_bytes == 3 * 400
    assert make_record(Contestant("mpi"), 100, 2, 1, ranks([[1.0]] * 2, "aa")).sent_bytes is None


def test_ranks_that_differ_are_shown() -> None:
    records = [
        make_record(Contestant("tf"), 10**6, 2, 1e9, ranks([[0.4], [0.4]], "aa")),
        make_record(Contestant("ring", "int8"), 10**6, 2, 1e9, ranks([[0.1], [0.1]], "ab")),
    ]
    compare_with_tf(records)
    assert records[1].times_tf == pytest.approx(4)
    console = Console(file=io.StringIO(), width=120)
    console.print(make_table(records))
    text = console.file.getvalue()
    assert "RANKS DIFFER" in text and "4.00x" in text and "1,000,000" in text


def test_numbers_are_short() -> None:
    assert [short(x) for x in (0.01234, 1.234, 12.34, 1234.5)] == ["0.0123", "1.23", "12.3", "1234"]


def test_the_error_is_relative_to_the_largest_number() -> None:
    truth = measure.exact(3, 1000)
    total = sum(measure.numbers(rank, 1000) for rank in range(3))
    assert 0 < measure.error(total, truth) < 1e-6
    assert measure.error(np.full(1000, np.nan, np.float32), truth) == math.inf
    assert measure.error(truth + np.max(np.abs(truth)), truth) == pytest.approx(1)


def test_contestants_take_turns() -> None:
    calls: list[str] = []
    functions = [lambda: calls.append("a"), lambda: calls.append("b")]
    turns = measure.Turns(lambda mine: 1.0, repeats=3, seconds=0)  # "everything takes a second"
    found = turns.measure(functions)
    assert [each["calls"] for each in found] == [1, 1]
    assert [len(each["times"]) for each in found] == [3, 3]
    assert "".join(calls) == "aaabbb" + "ababab"  # warm-up, then in turn


def test_a_picture_is_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from tfscale.tools.bench import plot

    records = [
        make_record(Contestant(name, wire), size, p, 1e9, ranks([[size * 1e-8]] * p, "a" * p))
        for p in (2, 4)
        for size in (10**3, 10**6)
        for name, wire in (("tf", "fp32"), ("ring", "fp32"), ("ring", "int8"))
    ]
    plot.draw(records, "title").savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
