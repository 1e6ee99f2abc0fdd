"""What docs/telemetry.md and the docstrings show is what happens."""

import dataclasses

import pytest
from helpers import ROOT, printed_by_example

from tests.callbacks.telemetries import compiled, fit, lines
from tfscale import ScaleStrategy
from tfscale.callbacks import Telemetry
from tfscale.strategy.explain import Row

TEXT = (ROOT / "docs" / "telemetry.md").read_text()


@pytest.mark.timeout(600)
def test_the_example_prints_what_it_says(tmp_path):
    printed, expected = printed_by_example(TEXT, tmp_path, 500)
    assert printed == expected
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"run.jsonl", "board", "trace.json"}
    kinds = {line["kind"]: line for line in lines(tmp_path / "run.jsonl")}
    for kind in kinds:
        assert f"| `{kind}` |" in TEXT


def test_the_page_names_every_number_and_field(tmp_path):
    strategy = ScaleStrategy("ring", "sign", ["CPU:0", "CPU:1"])
    with strategy.scope():
        model = compiled()
    history = fit(model, [Telemetry(tmp_path / "run.jsonl")]).history
    fields = {name for line in lines(tmp_path / "run.jsonl") for name in line}
    of_explain = {field.name for field in dataclasses.fields(Row)}
    for name in {*history, *fields} - of_explain - {"loss"}:
        assert f"`{name}`" in TEXT, name
