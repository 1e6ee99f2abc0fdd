"""``tfscale bench budgets``: nets that train within the budgets of ``Recompute``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfscale.tools.bench.budgets import BUDGETS, Planned, Trained, main, make_table


def trained(resident: int, ratio: float | None = None) -> Trained:
    plan = Planned("ViT", "50 %", "plan.json", 100e6, 200e6, 0.07, 0.1, 2.0)
    return Trained(plan, resident, ratio)


def test_a_training_that_takes_more_than_its_budget_is_marked() -> None:
    kept, broken = trained(90_000_000, ratio=1.2), trained(101_000_000)
    assert kept.keeps
    assert not broken.keeps
    cells = [list(column.cells) for column in make_table([kept, broken]).columns]
    assert cells[0] == ["ViT", ""]
    assert cells[4] == ["90%", "101% (more)"]
    assert cells[7] == ["1.20x", ""]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_net_trains_within_four_budgets(tmp_path: Path) -> None:
    """The times of steps on a busy machine are not part of the test."""
    main(["--nets", "ConvMixer", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [one["plan"]["budget"] for one in found] == list(BUDGETS)
    assert all(0 < one["resident"] <= one["plan"]["promised"] for one in found)
    assert [one["ratio"] is not None for one in found] == [False, True, False, False]
