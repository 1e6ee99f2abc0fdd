"""What docs/strategy.md shows is what happens."""

import re

import pytest
from helpers import ROOT, printed_by_example

from tests.strategy.cases import CASES

TEXT = (ROOT / "docs" / "strategy.md").read_text()


@pytest.mark.timeout(960)
def test_the_example_prints_what_it_says():
    printed, expected = printed_by_example(TEXT, ROOT, 900)
    assert printed == expected


def beginnings():
    """The last column of the table of what is exact."""
    table = TEXT.split("## What is exact")[1].split("## What is not exact")[0]
    return re.findall(r"`(\w+)`", " ".join(re.findall(r"\| ([^|]*) \|$", table, re.MULTILINE)))


@pytest.mark.parametrize("beginning", beginnings())
def test_what_is_said_to_be_tested_is(beginning):
    assert any(case.name.startswith(beginning) for case in CASES)
