"""``tfscale bench plan``: its arithmetic, and a real run with a toy model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfscale.collectives import Link, ring
from tfscale.support.records import Record
from tfscale.tools.bench import plan, plan_schedules
from tfscale.tools.bench.plan import Row


def test_a_forecast_is_the_price_on_measured_links() -> None:
    fields = {"link": {"alpha": 1e-4, "beta": 1e-9}, "gamma": 1e-10}
    found = plan_schedules.sums(Record(fields, Path("links")), "ring", 4, "fp32", 1000)
    assert found == ring(4).cost.time(4000, Link(1e-4, 1e-9), 1e-10)


def test_a_report_says_what_forecasts_are_worth() -> None:
    rows = [
        Row("schedules", "1gbit", 2, "ring fp32", measured=0.10, forecast=0.11),
        Row("schedules", "1gbit", 2, "ring int8", measured=0.05, forecast=0.06),
        Row("schedules", "1gbit", 2, "direct int8", measured=0.04, forecast=0.08),
    ]
    *_, errors, choice = plan.report(rows)
    assert errors == "error of a step: median 20%, worst 100%"
    assert choice == (
        "schedules, 1gbit, 2 processes: the plan chooses ring int8, which is 25% slower than the "
        "best (direct int8)"
    )


OF_PARTS = {
    "schedules": {"ring fp32"},
    "layouts": {
        "data 2", "data 2, ZeRO-2", "data 2, ZeRO-3",
        "data 1, stages 2, 1f1b, 2 microbatches", "data 1, stages 2, 1f1b, 4 microbatches",
    },
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("part", ["schedules", "layouts"])
def test_it_measures(part, tmp_path, capsys) -> None:
    file = tmp_path / "plan.json"
    words = ["--tiny", "--rounds", "2", "--steps", "2", "--algorithms", "ring", "--wires", "fp32"]
    assert plan.main([*words, "--parts", part, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["name"] for row in rows} >= OF_PARTS[part]
    assert all(row["measured"] > 0 and row["forecast"] > 0 for row in rows)
    assert "error of a step: median" in capsys.readouterr().out
