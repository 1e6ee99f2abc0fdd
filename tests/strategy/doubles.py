"""Float64, which shows a wrong sum: rounding is below 1e-12."""

import contextlib

import keras


def use_doubles():
    """Make Keras compute in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


@contextlib.contextmanager
def doubles():
    """Make Keras compute in float64 within this context."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    use_doubles()
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])
