"""Learning with rules by which replicas agree once in many steps."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from tfscale.tools.bench import rules, trainings
from tfscale.tools.bench.methods import checked_rule, rounds_of
from tfscale.tools.bench.rules import RULES, Plan, Run, orders
from tfscale.tools.bench.tasks import TASKS

TRUTH = np.repeat(np.arange(10), 24)


@pytest.mark.parametrize("replicas", [2, 4, 5])
def test_each_replica_has_an_equal_part_of_its_own_images(replicas):
    for shares in ("mixed", "sorted"):
        steps = 3 * (len(TRUTH) // replicas // 4) + 1  # of three epochs and the next
        order = orders(TRUTH, replicas, shares, samples=4, steps=steps, seed=1)
        assert order.shape == (steps, 4 * replicas)
        parts = [set(part.ravel().tolist()) for part in np.split(order, replicas, axis=1)]
        assert (
            sum(map(len, parts))
            == len(set.union(*parts))
            == len(TRUTH) // replicas // 4 * (4 * replicas)
        )
        digits = [len(set(TRUTH[sorted(part)])) for part in parts]
        assert max(digits) == (10 if shares == "mixed" else -(-10 // replicas))


def test_the_same_seed_gives_the_same_order():
    first, again, other = (orders(TRUTH, 2, "mixed", 4, 20, seed) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()


def test_rules_are_words():
    every = [rounds_of(rule).every for rule in RULES]
    assert every == [1, 4, 16, 64, 10, 50, 200, 50, 50, 10, 1, 1, 1, 16, 50]
    for wrong in ("DiLoCo", "DiLoCo(every=0)", "print(1)", "LocalSGD(8", "int8"):
        with pytest.raises(Exception, match="Give a rule"):
            checked_rule(wrong)


def test_a_batch_that_is_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="2 replicas cannot have 200 samples each"):
        orders(TRUTH, 2, "mixed", samples=200, steps=1, seed=0)


def test_sorted_sentences_have_one_mood_and_first_words_of_their_own():
    task = TASKS["language"]
    training, _ = task.data()
    order = orders(task.kinds(*training), 4, "sorted", samples=8, steps=62, seed=0)
    first = [training[0][part.ravel(), 0] for part in np.split(order, 4, axis=1)]
    odd = [np.mean(words % 2) for words in first]
    np.testing.assert_allclose(odd, [0, 0, 1, 1], atol=0.05)  # moods are not quite equal in number
    assert max(len(set(words)) for words in first) <= 7  # of 24


def arguments(*words):
    return rules.make_parser().parse_args(words)


def test_who_interrupts_it_has_all_rules_of_one_seed():
    grouped = "Hierarchical(outer=LocalSGD(4), group=2)"
    words = ["--rules", "EveryStep()", grouped, "--replicas", "4,2", "--seeds", "2"]
    plans = list(rules.planned(arguments(*words, "--tasks", "digits", "--rates", "1,3")))
    assert plans[:2] == [
        Plan("digits", "EveryStep()", 4, "mixed", 0, rate, batch=32, steps=600)
        for rate in (0.02, 0.06)
    ]
    assert [plan.seed for plan in plans] == 8 * [0] + 8 * [1] + 4 * [0] + 4 * [1]
    assert {plan.replicas for plan in plans if plan.rule == grouped} == {4}  # of 2, it is one group


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicas", "4,3"], "3 replicas cannot have equal parts"),
        (["--replicas", "1"], "nobody to synchronize with"),
        (["--rules", "ElasticAveraging(10, alpha=0.3)"], "alpha=0.3 is too large for 8 replicas"),
        (["--rules", "Hierarchical(group=3)"], "4 replicas cannot be divided into groups of 3"),
    ],
)
def test_what_would_fail_after_hours_is_refused_at_once(words, said, capsys):
    with pytest.raises(SystemExit):
        rules.main(words)
    assert said in " ".join(capsys.readouterr().err.split())


def run_of(rule, rate, seed, loss, accuracy=90.0, sent=100.0):
    plan = Plan("digits", rule, 2, "mixed", seed, rate, batch=32, steps=600)
    numbers = {"test_loss": loss + 0.5, "loss": loss, "sent": sent}
    return Run(**dataclasses.asdict(plan), accuracy=accuracy, **numbers)


def test_the_table_shows_the_rate_with_the_least_training_loss():
    often = [run_of("EveryStep()", 0.02, seed, 0.5, 95.0 + seed) for seed in (0, 1)]
    good = [run_of("LocalSGD(4)", 0.02, seed, 0.5, 94.0 + seed, sent=25.0) for seed in (0, 1)]
    lost = [run_of("LocalSGD(4)", 0.06, 0, 0.1), run_of("LocalSGD(4)", 0.06, 1, math.nan)]
    table = rules.make_table([*often, *lost, *good], "digits")
    exact, rare = zip(*(column.cells for column in table.columns))
    assert exact[:4] == ("EveryStep()", "0.02", "95.50 ± 0.71", "")
    assert rare[:4] == ("LocalSGD(4)", "0.02", "94.50 ± 0.71", "-1.00 ± 0.00")
    assert rare[4:7] == ("2.718 ± 0.000", "25", "4.0x")


def test_trainings_that_are_known_are_not_done_again(tmp_path):
    known = [run_of("LocalSGD(4)", 0.06, 1, math.nan)]
    plans = [Plan("digits", "LocalSGD(4)", 2, "mixed", seed, 0.06, 32, 600) for seed in (0, 1, 2)]
    made = []

    def train(plan):
        made.append(plan.seed)
        return run_of(plan.rule, plan.rate, plan.seed, 0.1)

    found = list(trainings.each_once(plans, known, train, lambda words, share: None))
    assert made == [0, 2]
    assert found[1] is known[0] and [run.seed for run in found] == [0, 1, 2]


def test_a_file_of_something_else_is_left_alone(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text('{"task": "digits"}\n')
    assert rules.main(["--json", str(other)]) == 1
    assert (
        "not trainings of this benchmark" in (said := capsys.readouterr().err)
        and "another name" in said
    )
    assert other.read_text() == '{"task": "digits"}\n'


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_goes_on_where_it_was_interrupted(tmp_path):
    words = ["--rules", "EveryStep()", "LocalSGD(16)", "--replicas", "2", "--seeds", "2"]
    words += ["--tasks", "perceptron", "--steps", "93", "--json", "runs.json"]
    command = [sys.executable, "-m", "tfscale", "bench", "rules", *words]

    def run():
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        assert "2 replicas, sorted data" in done.stdout
        return done.stdout, trainings.read(tmp_path / "runs.json", Run)

    _, whole = run()
    assert [each.rule for each in whole] == 2 * (2 * ["EveryStep()"] + 2 * ["LocalSGD(16)"])
    exact, _, rare, _ = whole[:4]
    assert exact.accuracy > 85 and rare.accuracy > 80
    assert 10 < exact.sent / rare.sent < 20
    written = (tmp_path / "runs.json").read_text().splitlines(keepends=True)
    (tmp_path / "runs.json").write_text("".join(written[:-1]))
    said, rest = run()
    assert "for 1 of 8 trainings" in said
    assert rest[:-1] == whole[:-1]
    assert rest[-1].loss == pytest.approx(whole[-1].loss, rel=1e-3)  # of one graph, and of another
    assert rest[-1].sent == whole[-1].sent
