"""What the docstring shows runs."""

import doctest

import keras

from tests.recompute.models import data, residual
from tfscale.callbacks import recompute


def fitted():
    """A model that can be trained, under the names that it uses."""
    keras.utils.set_random_seed(1)
    model = residual(8)
    model.compile("sgd", "mse")
    x, y = data(model)
    return {"model": model, "x": x, "y": y}


def test_the_example_of_the_docstring_runs():
    tried = doctest.testmod(recompute, extraglobs=fitted())
    assert tried.attempted
    assert not tried.failed
