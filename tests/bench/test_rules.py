"""How models learn where replicas agree once in many steps."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from tfscale.bench.methods import checked_rule, rule_of
from tfscale.bench.rules import RULES, orders

TRUTH = np.repeat(np.arange(10), 24)


@pytest.mark.parametrize("replicas", [2, 4, 5])
def test_each_replica_has_an_equal_part_of_its_own_images(replicas):
    for shares in ("mixed", "sorted"):
        order = orders(TRUTH, replicas, shares, samples=4, epochs=3, seed=1)
        assert order.shape == (3 * (len(TRUTH) // replicas // 4), 4 * replicas)
        parts = [set(part.ravel().tolist()) for part in np.split(order, replicas, axis=1)]
        assert (
            sum(map(len, parts))
            == len(set.union(*parts))
            == len(TRUTH) // replicas // 4 * (4 * replicas)
        )
        digits = [len(set(TRUTH[sorted(part)])) for part in parts]
        assert max(digits) == (10 if shares == "mixed" else -(-10 // replicas))


def test_the_same_seed_gives_the_same_order():
    first, again, other = (orders(TRUTH, 2, "mixed", 4, 2, seed) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()


def test_rules_are_words():
    assert [rule_of(rule).every for rule in RULES] == [1, 4, 16, 64, 10, 50, 200, 50, 10, 1, 16]
    for wrong in ("DiLoCo", "DiLoCo(every=0)", "print(1)", "LocalSGD(8", "int8"):
        with pytest.raises(Exception, match="Say a rule"):
            checked_rule(wrong)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run(tmp_path):
    words = ["--rules", "EveryStep()", "LocalSGD(16)", "--replicas", "2", "--seeds", "1"]
    words += ["--epochs", "4", "--json", "runs.json"]
    command = [sys.executable, "-m", "tfscale", "bench", "rules", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "2 replicas, sorted data" in done.stdout
    found = json.loads((tmp_path / "runs.json").read_text())
    assert [run["rule"] for run in found] == 2 * ["EveryStep()", "LocalSGD(16)"]
    exact, rare = found[:2]
    assert exact["accuracy"] > 85 and rare["accuracy"] > 80
    assert 10 < exact["sent"] / rare["sent"] < 20
