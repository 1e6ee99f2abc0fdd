"""Examples of docstrings and docs print what they show, and the names in them exist."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import tfscale.optimizers

DOCS = Path(__file__).parents[2] / "docs"
NAME = re.compile(r"`((?:keras|tf|tfscale|scipy|sklearn|datetime)\.[A-Za-z_0-9.]*\w)")


def is_there(name):
    """Whether a name exists as an attribute, or as a module that has to be imported."""
    parts = re.sub(r"^tf\.", "tensorflow.", name).split(".")
    found = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if hasattr(found, part):
            found = getattr(found, part)
        elif importlib.util.find_spec(".".join(parts[:i])):
            found = importlib.import_module(".".join(parts[:i]))
        else:
            return False
    return True


@pytest.mark.parametrize("page", ["optimizers.md", "from-tensorflow-addons.md"])
def test_what_the_docs_name_exists(page):
    names = set(NAME.findall((DOCS / page).read_text()))
    assert names
    assert not [name for name in names if not is_there(name)]
    assert not is_there("keras.optimizers.LAMB")


def test_the_example_of_the_page_runs():
    ((code),) = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "optimizers.md").read_text(), re.M | re.S
    )
    made = {}
    exec(code, made)
    assert isinstance(made["optimizer"], tfscale.optimizers.LARS)
