"""``tfscale bench curvature``, shortened; the full tables are in docs/benchmarks/curvature.md."""

import json

import pytest

from tfscale.tools.bench import curvature


@pytest.mark.slow
def test_it_measures_sharpness_and_growth(monkeypatch, tmp_path, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(curvature, "LEARNT", 2.0)
    monkeypatch.setattr(
        curvature, "WAYS", {"grows, adversarial": curvature.WAYS["grows, adversarial"]}
    )
    file = tmp_path / "runs.json"
    short = ["--batches", "64", "--tasks", "synthetic", "--seeds", "1", "--epochs", "2"]
    assert curvature.main([*short, "--json", str(file)]) == 0
    sharpness, growth = (json.loads(line) for line in file.read_text().splitlines())
    assert (sharpness["task"], sharpness["way"]) == ("sharpness", "64")
    assert 0.02 < sharpness["loss"] <= 2.0 and sharpness["top"] > 0
    assert growth["way"] == "grows, adversarial" and growth["updates"] == 2 * 32
    assert growth["robust"] < growth["accuracy"]
    printed = capsys.readouterr().out
    assert "sharpness" in printed and "grows, adversarial" in printed
