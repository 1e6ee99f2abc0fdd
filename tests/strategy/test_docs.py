"""Tests that docs/strategy.md names exist."""

import re

import pytest
from helpers import ROOT

from tests.strategy.cases import CASES

TEXT = (ROOT / "docs" / "strategy.md").read_text()


def beginnings():
    """The last column of the table of what is exact."""
    table = TEXT.split("## What is exact")[1].split("## What is not exact")[0]
    return re.findall(r"`(\w+)`", " ".join(re.findall(r"\| ([^|]*) \|$", table, re.MULTILINE)))


@pytest.mark.parametrize("beginning", beginnings())
def test_what_is_said_to_be_tested_is(beginning):
    assert any(case.name.startswith(beginning) for case in CASES)
