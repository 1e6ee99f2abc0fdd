"""What the documents show is what happens."""

from __future__ import annotations

import doctest
import importlib
import pathlib
import pkgutil
import re

import pytest

import tfscale.collectives

DOCS = pathlib.Path(__file__).parents[2] / "docs"
MODULES = [module.name for module in pkgutil.iter_modules(tfscale.collectives.__path__)]


@pytest.mark.parametrize("name", ["algorithms.md", "custom-schedules.md"])
def test_pictures_are_there_and_small(name: str) -> None:
    for picture in re.findall(r"\]\((images/.*?)\)", (DOCS / name).read_text()):
        assert (DOCS / picture).stat().st_size < 80_000


@pytest.mark.parametrize("module", ["", *(f".{name}" for name in MODULES)])
def test_examples_in_docstrings(module: str) -> None:
    found = importlib.import_module(f"tfscale.collectives{module}")
    failed, _ = doctest.testmod(found, optionflags=doctest.ELLIPSIS)
    assert not failed
