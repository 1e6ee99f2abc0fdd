"""Imported first by the parts that need TensorFlow: says what to do where there is none."""

try:
    import tensorflow  # noqa: F401
except ImportError as error:
    from tfscale.ops.toolchain import no_tensorflow

    raise ImportError(no_tensorflow(error)) from error
