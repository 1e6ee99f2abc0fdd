"""Examples of docs/telemetry.md and of docstrings print what they show."""

import dataclasses

from helpers import ROOT

from tests.callbacks.telemetries import compiled, fit, lines
from tfscale import ScaleStrategy
from tfscale.callbacks import Telemetry
from tfscale.exchange.explain import Row

TEXT = (ROOT / "docs" / "telemetry.md").read_text()


def test_the_page_names_every_number_and_field(tmp_path):
    strategy = ScaleStrategy("ring", "sign", ["CPU:0", "CPU:1"])
    with strategy.scope():
        model = compiled()
    history = fit(model, [Telemetry(tmp_path / "run.jsonl")]).history
    written = lines(tmp_path / "run.jsonl")
    for kind in {line["kind"] for line in written}:
        assert f"| `{kind}` |" in TEXT
    fields = {name for line in written for name in line}
    of_explain = {field.name for field in dataclasses.fields(Row)}
    for name in {*history, *fields} - of_explain - {"loss"}:
        assert f"`{name}`" in TEXT, name
