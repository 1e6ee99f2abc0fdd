"""Learning with each method, on small tasks; docs/benchmarks/convergence.md has the full table."""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import mean

import numpy as np
import pytest

from tfscale.compression import PowerSGD, Staged
from tfscale.tools.bench import convergence, synthetic, trainings
from tfscale.tools.bench.convergence import METHODS, Run
from tfscale.tools.bench.digits import judge
from tfscale.tools.bench.methods import method_of
from tfscale.tools.bench.trainings import spread

pytestmark = pytest.mark.timeout(960)

NAMES = {
    "int8": "int8",
    "sign": "Wire('sign', feedback=True)",
    "bad": "Wire('sign', feedback=False)",
}


def test_every_method_comes_with_error_feedback_and_without():
    names = [str(method_of(each)) for each in METHODS]
    assert names[0] == "fp32"
    assert len(set(names)) == len(METHODS) == 25
    with_it = {name.removesuffix(" + feedback") for name in names if name.endswith("feedback")}
    assert with_it == set(names[1:]) - {name for name in names if name.endswith("feedback")}


def test_methods_may_have_methods():
    staged = method_of("Staged('fp32', PowerSGD(1), when=100)")
    assert staged == Staged("fp32", PowerSGD(1), when=100)
    with pytest.raises(argparse.ArgumentTypeError, match="print is none of PowerSGD"):
        method_of("PowerSGD(print('x'))")


def test_judge():
    logits = np.array([[0.0, 0.0], [0.0, 0.0], [-1000.0, 1000.0], [5000.0, 0.0]])
    truth = np.array([0, 1, 1, 0])
    accuracy, loss = judge(lambda images: logits, None, truth)
    assert accuracy == 75
    assert loss == pytest.approx(np.log(2) / 2)
    words = judge(lambda images: logits.reshape(2, 2, 2), None, truth.reshape(2, 2))
    assert words == (accuracy, loss)


def test_spread():
    assert spread([1.0, 2.0, 3.0], "+.2f") == "+2.00 ± 1.00"
    assert spread([1.0], ".1f") == "1.0 ± nan"


def test_words_of_the_language_follow_as_they_should():
    (words, following), _ = synthetic.sentences()
    np.testing.assert_array_equal(words[:, 1:], following[:, :-1])
    for mood in (0, 1):
        of_mood = words[:, 0] % 2 == mood
        pairs = {*zip(words[of_mood].flat, following[of_mood].flat)}
        assert len(pairs) <= synthetic.WORDS * len(synthetic.NEXT)


def test_the_table_compares_seed_by_seed():
    def runs(method, *accuracies):
        numbers = {"test_loss": 0.0, "loss": 0.1, "sent": 1000.0, "seconds": 0.002}
        return [
            Run("digits", method, 2, seed, 0.1, 1, accuracy, **numbers)
            for seed, accuracy in enumerate(accuracies)
        ]

    table = convergence.make_table("digits", [*runs("fp32", 90, 95), *runs("TopK(0.1)", 89, 94)])
    exact, sparse = zip(*(column.cells for column in table.columns))
    assert exact[:3] == ("fp32", "92.50 ± 3.54", "")
    assert sparse[:4] == ("TopK(0.1) + feedback", "91.50 ± 3.54", "-1.00 ± 0.00", "1.000 ± 0.000")
    assert sparse[-2:] == ("1,000", "2.00")


def test_a_file_of_something_else_is_left_alone(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text('{"task": "digits"}\n')
    assert convergence.main(["--tasks", "perceptron", "--json", str(other)]) == 1
    assert (
        "not trainings of this benchmark" in (said := capsys.readouterr().err)
        and "another name" in said
    )
    assert other.read_text() == '{"task": "digits"}\n'


def run(file, *words):
    command = [sys.executable, "-m", "tfscale", "bench", "convergence", "--json", str(file)]
    subprocess.run([*command, *words], timeout=900, check=True)
    return trainings.read(file, Run)


@pytest.mark.full
def test_it_goes_on_where_it_was_interrupted(tmp_path):
    """Each training is the same, whatever was trained before it with the same graph."""
    method = "Wire('int8', feedback=False)"
    words = ["--tasks", "embedding", "--epochs", "1", "--methods", method]
    whole = run(tmp_path / "whole", *words, "--seeds", "2")
    written = (tmp_path / "whole").read_text().splitlines(keepends=True)
    assert len(whole) == len(written) == 4
    (tmp_path / "rest").write_text("".join(written[:3]))
    rest = run(tmp_path / "rest", *words, "--seeds", "2")
    assert rest[:3] == whole[:3]
    assert rest[3].method == method
    assert rest[3].seed == 1
    assert rest[3].loss == pytest.approx(whole[3].loss, rel=1e-3)
    assert rest[3].sent == pytest.approx(whole[3].sent, rel=0.01)
    exact, int8 = whole[0], whole[2]
    assert int8.sent < 0.5 * exact.sent
    assert int8.seconds < exact.seconds


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    file = tmp_path_factory.mktemp("convergence") / "runs.json"
    found = run(
        file, "--seeds", "2", "--replicas", "4", "--tasks", "perceptron",
        "--methods", *NAMES.values(),
    )  # fmt: skip

    def of(name):
        same = [each for each in found if each.method == NAMES.get(name, name)]
        return {what: [getattr(each, what) for each in same] for what in ("accuracy", "loss")}

    return of


@pytest.mark.full
def test_sign_needs_error_feedback(runs):
    exact, good, bad = runs("fp32"), runs("sign"), runs("bad")
    assert mean(exact["accuracy"]) > 96.5
    assert abs(mean(good["accuracy"]) - mean(exact["accuracy"])) < 1
    assert max(good["loss"]) < 1.5 * min(exact["loss"])
    assert min(bad["loss"]) > 2 * max(exact["loss"])


@pytest.mark.full
def test_int8_learns_as_fp32(runs):
    exact, int8 = runs("fp32"), runs("int8")
    for one, other in zip(exact["accuracy"], int8["accuracy"], strict=True):
        assert abs(one - other) < 0.5
    for one, other in zip(exact["loss"], int8["loss"], strict=True):
        assert abs(one - other) < 0.02 * one
