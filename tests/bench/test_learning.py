"""Learning with each optimizer; the full table is in docs/benchmarks/optimizers.md."""

from __future__ import annotations

import pytest

from tfscale.tools.bench import digits, learning, trainings
from tfscale.tools.bench.learning import CHOICE, FULL, RATES, Learner, Run, Setting

NAMES = ("Adam", "LAMB")


def of(optimizer, *accuracies, batch=FULL):
    return [
        Run(optimizer, batch, False, RATES[optimizer][1], seed, accuracy, 0.0)
        for seed, accuracy in enumerate(accuracies)
    ]


def rows(*groups):
    table = learning.make_table(FULL, [run for runs in groups for run in runs])
    return list(zip(*(column.cells for column in table.columns)))


def test_ours_are_held_against_the_best_of_the_others():
    sgd, adam, lamb = of("SGD", 99, 98), of("Adam", 80, 70), of("LAMB", 90, 89)
    *others, (*_, points, verdict) = rows(adam, sgd, lamb)
    assert (points, verdict) == ("-9.00 ± 0.00", "worse than SGD")
    assert all(row[-1] == "" for row in others)
    assert rows(lamb)[0][-1] == ""


@pytest.mark.parametrize(
    ("points", "verdict"),
    [
        ([2.0, 1.0, 1.0, 1.0, 1.0], "better than"),
        ([-2.0, -1.0, -1.0, -1.0, -1.0], "worse than"),
        ([2.0, 0.0, 1.0, 0.0, 1.0], "within noise of"),
        ([2.0], "within noise of"),
    ],
)
def test_what_is_not_sure_is_noise(points, verdict):
    assert learning.verdict(points) == verdict


def test_the_rate_is_that_of_the_best_trial():
    runs = [Run("Adam", 32, False, rate, CHOICE, 90.0, loss) for rate, loss in ((1, 0.3), (2, 0.2))]
    assert learning.best(runs).rate == 2
    runs.append(Run("Adam", 32, False, 3, CHOICE, 91.0, 0.5))
    assert learning.best(runs).rate == 3


def test_each_training_begins_anew():
    learner, data = Learner("AdaHessian", epochs=2, warmup=1), digits.load()

    def loss(seed, warmup=False):
        return learner.run(Setting("AdaHessian", 512, warmup), 0.1, seed, *data).loss

    first = loss(0)
    assert loss(1) != pytest.approx(first, rel=1e-4)
    assert loss(0, warmup=True) != pytest.approx(first, rel=1e-4)
    assert loss(0) == pytest.approx(first, rel=1e-4)


@pytest.mark.slow
def test_a_small_run(tmp_path, capsys):
    words = ["--optimizers", ",".join(NAMES), "--batches", FULL, "--seeds", "2", "--epochs", "1"]
    assert learning.main([*words, "--warmup", "1", "--json", str(tmp_path / "runs.json")]) == 0
    assert "command: tfscale bench learning" in capsys.readouterr().out
    runs = trainings.read(tmp_path / "runs.json", Run)
    for setting in [Setting(name, FULL, warmup) for name in NAMES for warmup in (False, True)]:
        tried = [run for run in runs if run.setting == setting and run.trial]
        used = [run for run in runs if run.setting == setting and not run.trial]
        assert [(run.rate, run.seed) for run in tried] == [
            (r, CHOICE) for r in RATES[setting.optimizer]
        ]
        assert [(run.rate, run.seed) for run in used] == [
            (learning.best(tried).rate, s) for s in (0, 1)
        ]
