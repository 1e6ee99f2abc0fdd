"""What docs/strategy.md shows is what happens."""

import re
import subprocess
import sys

import pytest

from tests.strategy.cases import CASES
from tests.strategy.groups import ROOT

TEXT = (ROOT / "docs" / "strategy.md").read_text()
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.timeout(960)
def test_the_example_prints_what_it_says():
    """explain() prints its table before."""
    ((code, expected),) = EXAMPLE.findall(TEXT)
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith(expected), ran.stdout


def beginnings():
    """The last column of the table of what is exact."""
    table = TEXT.split("## What is exact")[1].split("## What is not exact")[0]
    return re.findall(r"`(\w+)`", " ".join(re.findall(r"\| ([^|]*) \|$", table, re.MULTILINE)))


@pytest.mark.parametrize("beginning", beginnings())
def test_what_is_said_to_be_tested_is(beginning):
    assert any(case.name.startswith(beginning) for case in CASES)
