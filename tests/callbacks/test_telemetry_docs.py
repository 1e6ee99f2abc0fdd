"""What docs/telemetry.md and the docstrings show is what happens."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.callbacks.telemetries import compiled, fit, lines
from tfscale import ScaleStrategy
from tfscale.callbacks import Telemetry
from tfscale.strategy.explain import Row

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "telemetry.md").read_text()
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.timeout(600)
def test_the_example_prints_what_it_says(tmp_path):
    ((code, expected),) = EXAMPLE.findall(TEXT)
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == expected
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
