"""Examples of the documents print what they show."""

from __future__ import annotations

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["algorithms.md", "custom-schedules.md"])
def test_pictures_are_there_and_small(name: str) -> None:
    for picture in re.findall(r"\]\((images/.*?)\)", (DOCS / name).read_text()):
        assert (DOCS / picture).stat().st_size < 80_000
