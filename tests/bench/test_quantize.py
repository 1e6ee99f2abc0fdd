"""``tfscale bench quantize``; the figures are in docs/benchmarks/quantize.md."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tfscale.tools.bench import quantize, tuned
from tfscale.tools.bench.kept import Kept


def test_spearmans_correlation():
    assert quantize.spearman([1, 2, 3, 4], [10, 20, 30, 50]) == pytest.approx(1)
    assert quantize.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert quantize.spearman([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)


@pytest.mark.slow
def test_programs(tmp_path, capsys):
    file = tmp_path / "found.json"
    words = ["--parts", "programs", "--programs", "3", "--json", str(file)]
    assert quantize.main(words) == 0
    published, equal, large = json.loads(file.read_text())["programs"]
    assert len(published) == 18 and sum(same for *_, same, _ in published) == 17
    assert equal == 3 and all(proven for _, proven in large)
    assert "resnet50 latency 0.25" in capsys.readouterr().out


@pytest.mark.full  # tests/quantize/test_study.py compares traces with exact Hessians
def test_traces_of_a_small_run(tmp_path, capsys):
    file = tmp_path / "found.json"
    words = ["--parts", "traces", "--seeds", "1", "--samples", "32", "--json", str(file)]
    assert quantize.main(words) == 0
    (found,) = json.loads(file.read_text())["traces"]
    assert found["of"] == 7 and found["within"] >= 6


@pytest.mark.full
def test_the_order_of_a_small_run(tmp_path, capsys):
    file = tmp_path / "found.json"
    words = ["--parts", "order", "--seeds", "1", "--epochs", "1", "--samples", "4"]
    assert quantize.main([*words, "--json", str(file)]) == 0
    ((_, _, correlations),) = json.loads(file.read_text())["order"][0]
    assert len(correlations) == 3


def test_random_plans_take_nearly_the_bytes_of_4_bits():
    numbers = {"a": 1000, "b": 300, "c": 2000, "d": 50}
    for seed in range(20):
        bits = tuned.random_bits(numbers, np.random.default_rng(seed))
        used = sum(numbers[path] * width for path, width in bits.items())
        assert 0.95 * 4 * 3350 <= used <= 4 * 3350


def test_more_random_plans_begin_with_the_same_ones():
    numbers = {"a": 1000, "b": 300, "c": 2000, "d": 50}
    few, more = (tuned.random_plans(numbers, 3, count) for count in (2, 5))
    assert list(more) == [f"random {i}" for i in range(5)]
    assert few == {name: more[name] for name in few}
    assert few != tuned.random_plans(numbers, 4, 2)


def test_a_net_whose_widths_are_switched_is_that_of_apply():
    import keras

    from tfscale.analysis.quantize import apply

    layers = keras.layers
    x = np.random.default_rng(0).standard_normal((64, 6)).astype("float32")
    task = tuned.Task(lambda: None, (x, np.zeros(64, "int32")), (x, np.zeros(64, "int32")))
    model = keras.Sequential([keras.Input([6]), layers.Dense(5, "relu"), layers.Dense(3)])
    first, last = (layer.path for layer in model.layers)
    switched = tuned.Switched(model, {first: 4, last: 4}, task, 0, 1)
    once = switched.tuned({first: 2, last: 3})
    for bits in ({first: 8, last: 2}, {first: 2, last: 6}):
        expected = apply(model, bits).predict(x, verbose=0)
        np.testing.assert_array_equal(switched.set(bits).predict(x, verbose=0), expected)
    assert switched.tuned({first: 2, last: 3}) == once


def test_results_that_a_file_keeps_are_not_made_again(tmp_path):
    file = tmp_path / "kept"
    assert Kept(file).of("one", lambda: {"a": [1, 2.5]}) == {"a": [1, 2.5]}
    again = Kept(file)
    assert again.has("one") and not again.has("two")
    assert again.of("one", lambda: pytest.fail("made again")) == {"a": [1, 2.5]}
    file.write_text("no JSON\n")
    with pytest.raises(ValueError, match="not results of this benchmark.*Give --kept another name"):
        Kept(file)


@pytest.mark.full
def test_tuned_plans_of_a_small_run(tmp_path, capsys):
    file = tmp_path / "found.json"
    words = ["--parts", "tuned", "--tasks", "characters", "--seeds", "1", "--random", "1"]
    assert (
        quantize.main([*words, "--tuned-epochs", "1", "--float-epochs", "1", "--json", str(file)])
        == 0
    )
    (found,) = json.loads(file.read_text())["tuned"]
    (row,) = found["characters"]
    assert {"float", "hessian", "error", "uniform", "reversed", "random 0"} <= row.keys()
    assert "characters: test accuracy after" in capsys.readouterr().out
