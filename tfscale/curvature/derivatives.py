"""Derivatives of gradients that are in the graph which is being traced."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfscale.curvature.tracing import TracedGraphs

# What TensorFlow takes for constant when it differentiates gradients, and says nothing.
_SILENT = {
    "ResizeBilinearGrad": 'interpolation="bilinear" (not "nearest")',
    "FakeQuantWithMinMaxArgsGradient": "quantization-aware training",
    "FakeQuantWithMinMaxVarsGradient": "quantization-aware training",
    "FakeQuantWithMinMaxVarsPerChannelGradient": "quantization-aware training",
    "SparseAddGrad": "a sum of sparse tensors",
}

# tf.nn.moments, of which batch, layer and group normalization are made, takes the mean in its
# variance for constant: right for first derivatives, which are zero there, not for second ones.
_MEAN = re.compile(r"(^|/)moments(_\d+)?/StopGradient$")

# What is raised where TensorFlow knows no derivative of a gradient.
UNKNOWN = (LookupError, NotImplementedError)

REMEDY = (
    "Replace the layer that this names, or that follows the variable (for LSTM and GRU: "
    "use_cudnn=False, for attention: flash_attention=False), set trainable=False on what comes "
    "before it"
)


def again(
    ys: Sequence[Any], xs: Sequence[Any], weights: Sequence[Any], constants: Sequence[Any] = ()
) -> list[Any]:
    """The derivatives by ``xs`` of the sum of ``weights * ys``, where ``ys`` are gradients.

    What ``constants`` are computed from does not count. None stands where there is no path. Raises
    one of ``UNKNOWN`` where there is one, and TensorFlow cannot follow it.
    """
    operations = list(TracedGraphs().operations_before(list(ys)))
    for operation in operations:
        if operation.type in _SILENT:
            raise LookupError(f"{operation.name}, for {_SILENT[operation.type]}")
    with _means_that_depend(operations):
        return list(tf.gradients(list(ys), list(xs), list(weights), stop_gradients=list(constants)))


@contextlib.contextmanager
def _means_that_depend(operations: list[Any]) -> Iterator[None]:
    """While it lasts, the mean within ``tf.nn.moments`` depends on what it is the mean of."""
    stops = [one for one in operations if one.type == "StopGradient" and _MEAN.search(one.name)]
    for stop in stops:
        stop._gradient_function = lambda op, dy: dy
    try:
        yield
    finally:
        for stop in stops:
            stop._gradient_function = None


def first_sentence(error: Exception) -> str:
    """What TensorFlow says is missing."""
    return str(error.args[0] if error.args else error).split(". ")[0].strip()


def dense(gradient: Any, variable: Any) -> Any:
    """A gradient with all rows of its variable; those that come twice are summed."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = variable.shape[0]
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)
