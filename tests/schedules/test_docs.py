"""What docs/schedules.md shows is what happens."""

import contextlib
import io
import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_code_prints_what_it_says():
    blocks = BLOCK.findall((DOCS / "schedules.md").read_text())
    assert len(blocks) == 2
    namespace = {}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "schedules.md", "exec"), namespace)
        assert printed.getvalue() == expected
