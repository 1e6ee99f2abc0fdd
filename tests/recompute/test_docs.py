"""What docs/recompute.md and the docstring show runs."""

import doctest
import re
from pathlib import Path

import keras
import pytest

from tests.recompute.models import data, residual
from tfscale.callbacks import recompute

PAGE = Path(__file__).parents[2] / "docs" / "recompute.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def fitted():
    """A model that can be trained, under the names that the page uses."""
    keras.utils.set_random_seed(1)
    model = residual(8)
    model.compile("sgd", "mse")
    x, y = data(model)
    return {"model": model, "x": x, "y": y}


@pytest.mark.parametrize("code", BLOCKS)
def test_code_of_the_page_runs(code):
    pytest.importorskip("matplotlib")
    made = fitted()
    exec(code, made)
    assert made["model"].history.history["loss"]


def test_the_example_of_the_docstring_runs():
    tried = doctest.testmod(recompute, extraglobs=fitted())
    assert tried.attempted
    assert not tried.failed
