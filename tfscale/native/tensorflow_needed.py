"""Import of TensorFlow, with advice if it is missing."""

try:
    import tensorflow  # noqa: F401
except ImportError as error:
    from tfscale.native.toolchain import no_tensorflow

    raise ImportError(no_tensorflow(error)) from error
