"""Fixtures of the tests of models' matrices."""

import keras
import pytest


@pytest.fixture
def in_double():
    """Losses compute in Keras's ``floatx``, whatever the layers do."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(before)
